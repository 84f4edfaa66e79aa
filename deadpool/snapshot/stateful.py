"""What makes up one rank's training state: named tensors, and objects that go into the blob.

`collect` looks at the objects given to `wrap`, refuses by name what cannot come back bit for bit, and
says which tensors are copied in the background (changed by `optimizer.step` only) and which at the
boundary (buffers: a forward writes them).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from deadpool.errors import ConfigError
from deadpool.snapshot.adapter import StateAdapter, make_adapter
from deadpool.snapshot.codec import dtype_name, find_unstorable
from deadpool.snapshot.frameworks import fsdp
from deadpool.snapshot.frameworks.ddp import DdpBuckets, find_ddp_problems
from deadpool.snapshot.layout import Layout, TensorSpec, plan_layout, replicated_buffers
from deadpool.snapshot.optimizer_state import create_missing_state
from deadpool.snapshot.tensors import DerivedTensor, NamedTensor

# Non-persistent buffers above this size are tables that the constructor computes (positions, masks): they
# are checked, not copied. Smaller ones are simply copied. 64 KiB: below it a copy costs less than a check.
DERIVED_MIN_BYTES = 64 * 1024


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say where it is and be put back there."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """One rank's state: tensors in a fixed order, and the objects of the blob."""

    tensors: tuple[NamedTensor, ...]
    derived: tuple[DerivedTensor, ...]
    params: tuple[tuple[str, nn.Parameter], ...]  # trainable; their gradients are dropped at a restore
    models: tuple[tuple[str, nn.Module], ...]
    modules: tuple[tuple[str, tuple[nn.Module, ...]], ...]  # of each model, itself included
    optimizers: tuple[tuple[str, torch.optim.Optimizer], ...]
    scalars: tuple[
        tuple[str, dict[str, Any], str], ...
    ]  # optimizer state that is a plain number: name, dict, key
    objects: tuple[tuple[str, Stateful | torch.Generator], ...]
    extra_state: tuple[tuple[str, nn.Module], ...]  # modules that define get_extra_state
    ddp: tuple[DdpBuckets, ...]
    fsdp: tuple[tuple[str, tuple[Any, ...]], ...]  # root FSDP2 modules: the states at and below each
    adapters: tuple[tuple[str, StateAdapter], ...]  # of frameworks with state classes of their own


def collect(objects: Mapping[str, object]) -> TrainingState:
    """Find the state in the objects given to `wrap`, and create lazy optimizer state.

    Args:
        objects: keyword -> model, optimizer, anything with state_dict and load_state_dict, a list, tuple or
            dict of them, or None.

    Raises:
        ConfigError: lists everything that cannot be protected, by name and with the remedy.
    """
    named: dict[str, object] = {}
    for key, value in objects.items():
        named.update(_flatten(key, value))
    collector = _Collector()
    for key, value in named.items():
        collector.add(key, value)
    return collector.finish()


def layout_of(
    state: TrainingState, *, is_safe: Callable[[tuple[int, ...]], bool] = lambda ranks: len(ranks) > 1
) -> Layout:
    """Lay out the state's tensors; see `plan_layout`."""
    specs = []
    for item in state.tensors:
        tensor = item.resolve()
        specs.append(
            TensorSpec(
                name=item.name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                nbytes=tensor.numel() * tensor.element_size(),
                ranks=item.ranks,
            )
        )
    derived = [(item.name, f"{hash_tensor(item.resolve()):016x}") for item in state.derived]
    return plan_layout(specs, is_safe=is_safe, derived=derived)


def hash_replicated(state: TrainingState, layout: Layout) -> list[int]:
    """Signed 64-bit hashes of the replicated buffers, in the order of `replicated_buffers`.

    The caller gathers them from all ranks and passes them to `find_disagreements`.
    """
    live = {item.name: item.resolve for item in state.tensors}
    return [hash_tensor(live[buffer.name]()) - 2**63 for buffer in replicated_buffers(layout)]


def hash_tensor(tensor: torch.Tensor) -> int:
    """xxh3_64 of the raw bytes, row-major."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds this rank's data: the local shard of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_torchdata_loader(value: object) -> bool:
    """Whether `value` is torchdata's StatefulDataLoader; imports nothing."""
    module = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    return module is not None and isinstance(value, module.StatefulDataLoader)


def held_states(loader: DataLoader[Any]) -> list[tuple[str, Stateful]]:
    """The dataset and samplers of a loader that can say where they are."""
    held = {"dataset": loader.dataset, "sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    return [(name, part) for name, part in held.items() if isinstance(part, Stateful)]


def _flatten(key: str, value: object) -> dict[str, object]:
    """Open lists, tuples and dicts that hold models, optimizers or stateful objects."""
    items: Iterator[tuple[object, object]] | None = None
    if isinstance(value, list | tuple):
        items = iter(enumerate(value))
    elif type(value) is dict:
        items = iter(value.items())
    if items is None:
        return {key: value}
    opened = {f"{key}.{index}": item for index, item in items}
    return opened if opened and any(_is_known(item) for item in opened.values()) else {key: value}


def _is_known(value: object) -> bool:
    return isinstance(value, nn.Module | torch.optim.Optimizer | torch.Generator | Stateful)


class _Collector:
    """Gathers state and problems; `finish` raises all problems at once."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._tensors: dict[str, NamedTensor] = {}
        self._derived: list[DerivedTensor] = []
        self._params: dict[str, nn.Parameter] = {}
        self._param_names: dict[int, str] = {}  # id of a parameter -> name of its tensor
        self._param_ranks: dict[int, tuple[int, ...]] = {}
        self._seen: set[int] = set()  # ids of buffers
        self._models: list[tuple[str, nn.Module]] = []
        self._optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self._scalars: list[tuple[str, dict[str, Any], str]] = []
        self._objects: list[tuple[str, Stateful | torch.Generator]] = []
        self._extra_state: list[tuple[str, nn.Module]] = []
        self._ddp: list[DdpBuckets] = []
        self._fsdp: list[tuple[str, tuple[Any, ...]]] = []
        self._adapters: list[tuple[str, StateAdapter]] = []
        self._adapted_optimizers: list[tuple[str, torch.optim.Optimizer]] = []

    def add(self, key: str, value: object) -> None:
        """Sort one object of `wrap`."""
        if value is None or self._add_adapter(key, value):
            return
        if isinstance(value, nn.Module):
            self._add_model(key, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizers.append((key, value))
        elif isinstance(value, torch.Generator):
            self._objects.append((key, value))
        elif isinstance(value, Stateful) and not isinstance(value, type):
            self._add_object(key, value)
        else:
            self._problems.append(_explain_stateless(key, value))

    def finish(self) -> TrainingState:
        """Add the optimizers, after all models, and give the result."""
        for key, optimizer in self._optimizers:
            problems = create_missing_state(key, optimizer)
            self._problems += problems
            if not problems:
                self._add_optimizer(key, optimizer)
        if not self._problems and not self._tensors and not self._objects:
            self._problems.append("nothing to protect: pass model=, optimizer= and data= to wrap")
        if self._problems:
            raise ConfigError(self._problems)
        return TrainingState(
            tensors=tuple(self._tensors.values()),
            derived=tuple(self._derived),
            params=tuple(self._params.items()),
            models=tuple(self._models),
            modules=tuple((key, tuple(model.modules())) for key, model in self._models),
            optimizers=(*self._optimizers, *self._adapted_optimizers),
            scalars=tuple(self._scalars),
            objects=tuple(self._objects),
            extra_state=tuple(self._extra_state),
            ddp=tuple(self._ddp),
            fsdp=tuple(self._fsdp),
            adapters=tuple(self._adapters),
        )

    def _add_adapter(self, key: str, value: object) -> bool:
        """Whether a plugin knows this object; its problems are noted."""
        try:
            adapter = make_adapter(key, value)
        except ConfigError as error:
            self._problems += error.problems
            return True
        if adapter is None:
            return False
        self._adapters.append((key, adapter))
        for item in adapter.tensors():
            if self._check_tensor(item.name, item.resolve()):
                self._put(item)
        for name, module in adapter.modules():
            self._models.append((name, module))
            self._add_buffers(name, module)
        self._adapted_optimizers += adapter.optimizers()
        return True

    def _add_model(self, key: str, model: nn.Module) -> None:
        self._models.append((key, model))
        for name, module in model.named_modules():
            path = f"{key}.{name}" if name else key
            if isinstance(module, DistributedDataParallel):
                problems = find_ddp_problems(path, module)
                self._problems += problems
                if not problems:
                    self._ddp.append(DdpBuckets(path, module))
                    self._note_replicas(module)
            elif type(module).__name__ == "FullyShardedDataParallel":
                self._problems.append(
                    f"{path}: FSDP1 is not supported; use torch.distributed.fsdp.fully_shard (FSDP2)"
                )
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._add_extra_state(path, module)
        for name, module in fsdp.find_roots(model):
            states = fsdp.find_states(module)
            fsdp.settle_shards(states)
            self._fsdp.append((f"{key}.{name}" if name else key, states))
        for name, param in model.named_parameters():
            self._add_param(f"{key}.{name}", param)
        self._add_buffers(key, model)

    def _add_buffers(self, key: str, model: nn.Module) -> None:
        for path, module in model.named_modules(prefix=key):
            persistent = set(module._buffers) - module._non_persistent_buffers_set
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in self._seen:
                    self._seen.add(id(buffer))
                    self._add_buffer(f"{path}.{name}", module, name, is_persistent=name in persistent)

    def _note_replicas(self, ddp: DistributedDataParallel) -> None:
        ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
        ignored = ddp.parameters_to_ignore
        for name, param in ddp.module.named_parameters():
            if name not in ignored:
                self._param_ranks[id(param)] = ranks

    def _add_param(self, name: str, param: nn.Parameter) -> None:
        if id(param) in self._param_names:
            return  # tied, or reachable from two of the given models
        self._param_names[id(param)] = name
        if self._check_tensor(name, param):
            ranks = self._param_ranks.get(id(param), ())
            self._put(NamedTensor(name=name, resolve=_local_of(param), at_boundary=False, ranks=ranks))
        if param.requires_grad:
            self._params[name] = param

    def _add_buffer(self, name: str, module: nn.Module, key: str, *, is_persistent: bool) -> None:
        buffer = module._buffers[key]
        if buffer is None or not self._check_tensor(name, buffer):
            return
        resolve = _local_of_buffer(module, key)
        if is_persistent or buffer.numel() * buffer.element_size() <= DERIVED_MIN_BYTES:
            self._put(NamedTensor(name=name, resolve=resolve, at_boundary=True))
        else:
            built = resolve()
            self._derived.append(
                DerivedTensor(name=name, resolve=resolve, built=built, version=built._version)
            )

    def _add_optimizer(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if id(param) not in self._param_names:
                    self._add_param(f"{key}.group{group_index}.{index}", param)
                self._add_param_state(key, optimizer, param)

    def _add_param_state(self, key: str, optimizer: torch.optim.Optimizer, param: nn.Parameter) -> None:
        prefix = f"{key}.state.{self._param_names[id(param)]}"
        state = optimizer.state.get(param, {})
        for part, value in state.items():
            name = f"{prefix}.{part}"
            if isinstance(value, torch.Tensor):
                if self._check_tensor(name, value):
                    ranks = self._param_ranks.get(id(param), ())
                    self._put(
                        NamedTensor(
                            name=name, resolve=_local_of_item(state, part), at_boundary=False, ranks=ranks
                        )
                    )
            elif value is None or isinstance(value, bool | int | float):
                self._scalars.append((name, state, part))
            else:
                self._problems.append(
                    f"{name}: optimizer state of type {type(value).__qualname__}; only tensors and numbers "
                    "can be stored"
                )

    def _add_object(self, key: str, value: Stateful) -> None:
        self._objects.append((key, value))
        if is_torchdata_loader(value):
            if not getattr(value, "in_order", True):
                self._problems.append(
                    f"{key}: a StatefulDataLoader with in_order=False does not know which batch comes next; "
                    "use in_order=True"
                )
            return  # asking it now would start its workers; its state is plain by its own contract
        refusal = find_unstorable(value.state_dict(), f"{key}.state_dict()")
        if refusal is not None:
            self._problems.append(refusal)

    def _add_extra_state(self, path: str, module: nn.Module) -> None:
        self._extra_state.append((path, module))
        refusal = find_unstorable(module.get_extra_state(), f"{path}.get_extra_state()")
        if refusal is not None:
            self._problems.append(refusal)

    def _put(self, item: NamedTensor) -> None:
        if item.name in self._tensors:
            self._problems.append(f"{item.name}: two tensors have this name")
        self._tensors[item.name] = item

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        problem = _find_tensor_problem(tensor)
        if problem is not None:
            self._problems.append(f"{name}: {problem}")
        return problem is None


def _find_tensor_problem(tensor: torch.Tensor) -> str | None:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return "a lazy module that was never run; run one forward before wrap"
    local = local_part(tensor)
    if local.is_meta:
        return "is on the meta device; materialise the model (to_empty and an initialisation) before wrap"
    if local.layout is not torch.strided:
        return f"has layout {local.layout}; only dense tensors can be captured"
    if type(local) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(local).__qualname__}; only plain tensors and DTensors can be captured"
    if local.is_inference():
        return "was made in inference mode; create it outside torch.inference_mode()"
    if torch._debug_has_internal_overlap(local) == 1:
        return "has elements that share memory (expand); register it as .contiguous()"
    return None


def _local_of(param: torch.Tensor) -> Callable[[], torch.Tensor]:
    if isinstance(param, DTensor):
        return lambda: param._local_tensor
    return lambda: param


def _local_of_buffer(module: nn.Module, key: str) -> Callable[[], torch.Tensor]:
    # Looked up each time: `self.buffer = new` replaces the tensor in the table.
    return lambda: local_part(module.get_buffer(key))


def _local_of_item(state: dict[str, Any], key: str) -> Callable[[], torch.Tensor]:
    return lambda: local_part(state[key])


def _explain_stateless(key: str, value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, DataLoader):
        return (
            f"{key}: a plain DataLoader cannot say which batch comes next; use "
            "torchdata.stateful_dataloader.StatefulDataLoader (same arguments)"
        )
    if hasattr(value, "__next__"):
        return (
            f"{key}: a bare iterator ({kind}) cannot be wound back; pass the loader that it comes from (a "
            "StatefulDataLoader, or any object with state_dict and load_state_dict) and call iter() inside "
            "train, or compute each batch from the step and leave it out"
        )
    return (
        f"{key}: {kind} has no state_dict() and load_state_dict(); give it both, or leave it out if each "
        "step can compute it from the step number"
    )
