"""Every attribute of an engine, flattened, so that two states of it can be compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from deadpool.plugins.deepspeed.stage3 import cached_method

_RELEASED = "_PartitionedParameterCoordinator__params_to_release"
IGNORED = {
    "_config",
    "_is_gradient_accumulation_boundary",  # of the optimizer: set at the begin of each backward
    "_global_grad_norm",  # results of the last step, which the next one overwrites
    "agg_train_loss",
    "fwd_outputs",
    "loss",
    "total_loss",
    "basic_optimizer",  # values of the state: compared bit for bit elsewhere
    "checkpoint_engine",
    "config",
    "monitor",
    "start_time",
    "tput_timer",  # throughput for the log
    "batch_timer",
    "event_timers",
    "end_time",
}


def flatten(engine: Any) -> dict[str, str]:
    """Path -> what is there. Tensors by type and shape, objects that are not DeepSpeed's by their class."""
    released = cached_method(PartitionedParameterCoordinator, _RELEASED).cache_info().currsize
    outside = {"modules in forward": len(parameter_offload.FWD_MODULE_STACK), "cached": released}
    return {**{name: str(count) for name, count in outside.items()}, **dict(_walk(engine, "engine", set()))}


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Paths at which two flattened engines differ."""
    return sorted(path for path in {*one, *other} if one.get(path) != other.get(path))


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, bool | int | float | str | Enum | torch.dtype):
        yield path, repr(value)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield path, f"{type(value).__name__} of {len(value)}"
        if id(value) not in seen:
            seen.add(id(value))
            for index, item in enumerate(value):
                yield from _walk(item, f"{path}[{index}]", seen)
    elif isinstance(value, Mapping) or (hasattr(value, "data") and isinstance(value.data, dict)):
        yield path, f"{type(value).__name__} of {len(value)}"
        if id(value) not in seen:
            seen.add(id(value))
            for index, (key, item) in enumerate(value.items()):
                name = key if isinstance(key, str | int) and not _is_identity(key) else index
                yield from _walk(item, f"{path}[{name}]", seen)
            for name, item in getattr(value, "__dict__", {}).items():  # a table of ZeRO-3 has flags, too
                if name != "data":
                    yield from _walk(item, f"{path}.{name}", seen)
    else:
        yield from _walk_object(value, path, seen)


def _walk_object(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    is_tensor = isinstance(value, torch.Tensor)
    yield path, f"{value.dtype}{list(value.shape)}" if is_tensor else type(value).__name__
    if is_tensor:
        yield f"{path}.grad", "none" if value.grad is None else "some"
    ours = type(value).__module__.startswith("deepspeed") or isinstance(value, torch.nn.Module) or is_tensor
    if not ours or id(value) in seen or not hasattr(value, "__dict__"):
        return
    seen.add(id(value))
    for name, item in vars(value).items():
        if isinstance(item, torch.nn.Module) or not (name in IGNORED or callable(item)):
            yield from _walk(item, f"{path}.{name}", seen)


def _is_identity(key: object) -> bool:
    return isinstance(key, int) and key > 1 << 32
