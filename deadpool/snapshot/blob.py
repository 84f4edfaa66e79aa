"""The blob of a snapshot: everything small that is not in the named buffers.

RNG, learning rates and other group settings, schedulers, scaler, data position, switches of DDP and FSDP2,
counters. Built at the boundary on the training thread, readable without pickle (see codec).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deadpool.errors import IntegrationError, LayoutMismatch, ReplicaCorrupt
from deadpool.snapshot import codec
from deadpool.snapshot.frameworks import fsdp
from deadpool.snapshot.rng import find_generators, read_global_rng
from deadpool.snapshot.stateful import Stateful, TrainingState, held_states, is_torchdata_loader

BLOB_VERSION = 1
MIN_CAPACITY_BYTES = 256 * 1024
GROWTH = 4  # a data position grows during a run: shuffles, worker states, records of the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A decoded blob. Its parts are plain values, keyed by the names of the state."""

    step: int
    in_loop: bool  # taken inside train's loop: see [Note: when generators are restored] in rng
    counters: dict[str, Any]
    rng: dict[str, Any]
    parts: dict[str, Any]


def capacity_for(first_blob_bytes: int) -> int:
    """Bytes to reserve for the blobs of a run, from the size of its first one."""
    wanted = max(MIN_CAPACITY_BYTES, GROWTH * first_blob_bytes)
    return -(-wanted // 4096) * 4096


def build_blob(
    state: TrainingState, *, step: int, in_loop: bool = True, counters: Mapping[str, object] | None = None
) -> bytes:
    """Encode the blob of the state as it is after `step`.

    RNG is read first: asking an object for its state may draw from a generator.

    Args:
        state: the state, at a boundary.
        step: the step that ended.
        in_loop: False for the snapshot that is taken before `train` is first entered.
        counters: what the caller wants back, as plain values.

    Raises:
        IntegrationError: an object's state can no longer be stored without pickle; names the part.
    """
    rng = read_global_rng()
    rng["generators"] = {
        name: [item.get_state() for item in find_generators(value)] for name, value in state.objects
    }
    parts: dict[str, object] = {
        "objects": {name: _read_object(value) for name, value in state.objects},
        "groups": {name: _read_groups(optimizer) for name, optimizer in state.optimizers},
        "scalars": {name: table[key] for name, table, key in state.scalars},
        "extra_state": {name: module.get_extra_state() for name, module in state.extra_state},
        "has_gradient": bytes(param.grad is not None for _, param in state.params),
        "ddp": {
            item.name: {
                "buckets": item.rebuilt,
                "syncs_backward": item.ddp.require_backward_grad_sync,
                "syncs_forward": item.ddp.require_forward_param_sync,
            }
            for item in state.ddp
        },
        "fsdp": {name: fsdp.read_flags(states) for name, states in state.fsdp},
        "adapters": {name: dict(adapter.read()) for name, adapter in state.adapters},
        "training": {name: bytes(module.training for module in modules) for name, modules in state.modules},
    }
    tree = {
        "version": BLOB_VERSION,
        "step": step,
        "in_loop": in_loop,
        "counters": dict(counters or {}),
        "rng": rng,
        "parts": parts,
    }
    try:
        return codec.pack(tree, "blob")
    except codec.Unstorable as refusal:
        raise IntegrationError(f"the state after step {step} cannot be stored: {refusal}") from refusal


def read_blob(data: bytes | memoryview) -> Blob:
    """Decode a blob.

    Raises:
        ReplicaCorrupt: the bytes are no blob, or one of another version.
    """
    tree = codec.unpack(data)
    if not isinstance(tree, dict) or tree.get("version") != BLOB_VERSION:
        raise ReplicaCorrupt(f"{len(data)} bytes are no blob of version {BLOB_VERSION}")
    return Blob(
        step=tree["step"],
        in_loop=tree["in_loop"],
        counters=tree["counters"],
        rng=tree["rng"],
        parts=tree["parts"],
    )


def why_not_now(state: TrainingState, *, has_stepped: bool) -> str | None:
    """The reason why the state at this boundary cannot be captured, or None. A later one may do.

    Args:
        state: the state, at a boundary.
        has_stepped: whether an optimizer stepped since the boundary before.

    Raises:
        LayoutMismatch: no later one will do either; names what was changed.
    """
    for table in state.derived:
        if not table.is_unchanged:
            raise LayoutMismatch(
                f"{table.name}: changed since wrap; register it with persistent=True, so that it is copied"
            )
    for item in state.ddp:
        if not item.is_settled:
            return f"{item.name}: DDP rebuilds its buckets in the next forward"
    for name, states in state.fsdp:
        if fsdp.has_unreduced_gradients(states):
            return f"{name}: gradients that are not reduced yet are carried over the boundary"
    for _, adapter in state.adapters:
        reason = adapter.why_not_now(has_stepped=has_stepped)
        if reason is not None:
            return reason
    if not has_stepped:
        for name, param in state.params:
            if param.grad is not None:
                return f"{name}: no optimizer stepped, and its gradient may be carried over the boundary"
    return None


def _read_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _read_object(value: Stateful | torch.Generator) -> object:
    if isinstance(value, torch.Generator):
        return None  # among the generators of the RNG part
    if is_torchdata_loader(value):
        return _read_loader(value)
    return {"state": value.state_dict()}


def _read_loader(loader: Any) -> object:
    """The position of a StatefulDataLoader, without making it start an iterator.

    Its state_dict() speaks for the current iterator, which the training loop holds, and is that after the
    last batch that the loop took. Without one it would create one, start the workers, and draw a seed from
    the global generator that the loop's own iter() would have drawn: so it is only marked as not begun.
    """
    begun = loader._iterator is not None
    return {
        "state": loader.state_dict() if begun else loader.next_iter_state,
        # An iterator's state holds theirs; without one they are where the next iter() begins.
        "holds": {} if begun else {name: part.state_dict() for name, part in held_states(loader)},
        "epoch": getattr(loader.sampler, "epoch", None),  # DistributedSampler's seed; not in its state
    }
