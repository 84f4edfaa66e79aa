"""Restore in place: tensors from a bank, objects from a blob, frameworks to where a step begins.

Order, on survivors and on a promoted spare alike: `reset_after_abort`, `restore_tensors`, `restore_blob`,
`restore_rng`; and `restore_rng` once more when the loop takes its first step, if the blob is `in_loop`.
"""

from __future__ import annotations

from typing import Any

import torch

from deadpool.errors import LayoutMismatch
from deadpool.snapshot.blob import Blob
from deadpool.snapshot.capture import bank_tensors
from deadpool.snapshot.frameworks import fsdp
from deadpool.snapshot.frameworks.ddp import Serve
from deadpool.snapshot.layout import Layout
from deadpool.snapshot.rng import find_generators, restore_global_rng
from deadpool.snapshot.stateful import Stateful, TrainingState, held_states, is_torchdata_loader, local_part


def reset_after_abort(state: TrainingState) -> None:
    """Bring DDP reducers, FSDP2 modules and frameworks with an adapter back to idle.

    Asks no peer; harmless when nothing broke.
    """
    for item in state.ddp:
        item.reset()
    for _, states in state.fsdp:
        fsdp.reset_after_abort(states)
    for _, adapter in state.adapters:
        adapter.reset()


def restore_tensors(
    state: TrainingState,
    layout: Layout,
    unique: memoryview,
    replicated: memoryview,
    *,
    only_boundary: bool = False,
) -> int:
    """Copy a bank back into the live tensors, in place.

    Args:
        state: the live state.
        layout: of the bank; it must be this state's own.
        unique: the bank's unique area.
        replicated: the bank's replicated area.
        only_boundary: copy only what a forward may write. Enough for a survivor that began no optimizer step
            since the snapshot.

    Returns:
        Bytes copied.
    """
    sources = bank_tensors(layout, unique, replicated)
    targets: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    for item, buffer, source in zip(state.tensors, layout.buffers, sources, strict=True):
        target = item.resolve().detach()
        if buffer.name != item.name or target.dtype is not source.dtype or target.shape != source.shape:
            raise LayoutMismatch(
                f"{item.name} does not fit the snapshot's {buffer.name} {buffer.dtype}{list(buffer.shape)}"
            )
        if buffer.nbytes and (item.at_boundary or not only_boundary):
            targets.append(target)
            chosen.append(source)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, chosen)
    return sum(source.numel() * source.element_size() for source in chosen)


def restore_blob(state: TrainingState, blob: Blob, *, serve: Serve) -> None:
    """Put every object back where it was after the blob's step. Does not touch RNG: see `restore_rng`.

    Args:
        state: the live state, with its tensors restored.
        blob: of the same snapshot as the tensors.
        serve: as for `DdpBuckets.install`; called once for every DDP module, in the same order on all ranks.

    Raises:
        LayoutMismatch: the blob was made by a script with other objects.
    """
    parts = blob.parts
    _check_names(state, parts)
    for name, value in state.objects:
        _restore_object(value, parts["objects"][name])
    for name, optimizer in state.optimizers:
        _restore_groups(name, optimizer, parts["groups"][name])
    for name, table, key in state.scalars:
        table[key] = parts["scalars"][name]
    for name, module in state.extra_state:
        module.set_extra_state(parts["extra_state"][name])
    _restore_modes(state, parts["training"])
    _drop_gradients(state, parts["has_gradient"])
    for name, states in state.fsdp:
        fsdp.restore_flags(states, parts["fsdp"][name])
    for item in state.ddp:
        part = parts["ddp"][item.name]
        item.ddp.require_backward_grad_sync = part["syncs_backward"]
        item.ddp.require_forward_param_sync = part["syncs_forward"]
        item.install(part["buckets"], serve)
    for name, adapter in state.adapters:
        adapter.restore(parts["adapters"][name])


def restore_rng(state: TrainingState, blob: Blob) -> None:
    """Set the global generators, and those of the state's objects, to where they were after the blob's step.

    See [Note: when generators are restored] in rng.
    """
    for name, value in state.objects:
        stored = blob.rng["generators"].get(name, [])
        for generator, generator_state in zip(find_generators(value), stored, strict=True):
            generator.set_state(generator_state.to("cpu"))
    restore_global_rng(blob.rng)


def _check_names(state: TrainingState, parts: dict[str, Any]) -> None:
    expected = {
        "objects": [name for name, _ in state.objects],
        "groups": [name for name, _ in state.optimizers],
        "scalars": [name for name, _, _ in state.scalars],
        "extra_state": [name for name, _ in state.extra_state],
        "training": [name for name, _ in state.models],
        "ddp": [item.name for item in state.ddp],
        "fsdp": [name for name, _ in state.fsdp],
        "adapters": [name for name, _ in state.adapters],
    }
    for part, names in expected.items():
        stored = set(parts.get(part, ()))
        if stored != set(names):
            raise LayoutMismatch(
                f"the snapshot's {part} are {sorted(stored)}, this script has {sorted(names)}"
            )
    if len(parts["has_gradient"]) != len(state.params):
        raise LayoutMismatch(
            f"the snapshot has {len(parts['has_gradient'])} trainable parameters, "
            f"this script {len(state.params)}"
        )


def _restore_object(value: Stateful | torch.Generator, part: Any) -> None:
    if isinstance(value, torch.Generator):
        return  # see restore_rng
    if is_torchdata_loader(value):
        _restore_loader(value, part)
    else:
        value.load_state_dict(part["state"])
        if isinstance(value, torch.amp.GradScaler):
            # Not in its state_dict: an abort between unscale_ and update would make the next unscale_ raise.
            value._per_optimizer_states.clear()


def _restore_loader(loader: Any, part: dict[str, Any]) -> None:
    """Applies at the next iter(); the old iterator and its workers go with their last reference."""
    loader.load_state_dict(part["state"] or {})
    loader.next_iter_state = part["state"]
    for name, held in held_states(loader):
        if name in part["holds"]:
            held.load_state_dict(part["holds"][name])
    if part["epoch"] is not None:
        loader.sampler.epoch = part["epoch"]


def _restore_groups(name: str, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise LayoutMismatch(
            f"{name}: the snapshot has {len(groups)} parameter groups, "
            f"this script {len(optimizer.param_groups)}"
        )
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for key, value in stored.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)  # a learning rate on the device: graphs and schedulers hold this tensor
            else:
                group[key] = value


def _restore_modes(state: TrainingState, modes: dict[str, bytes]) -> None:
    for name, modules in state.modules:
        for module, is_training in zip(modules, modes[name], strict=True):
            module.training = bool(is_training)


def _drop_gradients(state: TrainingState, has_gradient: bytes) -> None:
    """Leave no gradient, or zeros where the boundary had one.

    With `zero_grad(set_to_none=False)` the next backward adds to what is there, and 0 + -0.0 is not -0.0: so
    a gradient that was there must be there again. One that is a view into a DDP bucket stays one.
    """
    for (_, param), was_there in zip(state.params, has_gradient, strict=True):
        if not was_there:
            param.grad = None
        elif param.grad is None:
            param.grad = torch.zeros_like(param)
        else:
            local_part(param.grad).zero_()
