"""The seam for frameworks that keep training state in classes of their own: DeepSpeed, megatron-core.

A plugin registers, at import, how to make the adapter of its framework's class. `wrap` then takes an object
of that class like a model or an optimizer; all that follows (capture, replication, restore) is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deadpool.errors import ConfigError
from deadpool.snapshot.tensors import NamedTensor


class StateAdapter(ABC):
    """What one object of a framework adds to a rank's state.

    All methods are called on the training thread, on survivors and on a promoted spare alike. None may issue
    a collective or wait for one. Order of a recovery: `reset`, then the tensors are copied back, `restore`.
    """

    @abstractmethod
    def tensors(self) -> Sequence[NamedTensor]:
        """The tensors that a snapshot holds, in an order that depends on the script alone.

        Called once, before the first capture; lazy state exists afterwards. Leave out what `restore` can
        compute again exactly.
        """

    @abstractmethod
    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        """Modules whose buffers and training flags belong to the state; their parameters do not."""

    @abstractmethod
    def optimizers(self) -> Sequence[tuple[str, torch.optim.Optimizer]]:
        """Optimizers whose `step`, and nothing else, changes `tensors`. Their group settings are restored."""

    @abstractmethod
    def why_not_now(self, *, has_stepped: bool) -> str | None:
        """Why the state at this boundary cannot be captured, or None. A later one may do.

        Args:
            has_stepped: whether one of `optimizers` stepped since the boundary before.

        Raises:
            LayoutMismatch: no later one will do either.
        """

    @abstractmethod
    def read(self) -> Mapping[str, object]:
        """Counters and other small values of this boundary, of kinds that the codec can store."""

    @abstractmethod
    def reset(self) -> None:
        """Throw away what a step left half done: buckets, handles, gradients, hooks. Harmless when idle."""

    @abstractmethod
    def restore(self, stored: Mapping[str, Any]) -> None:
        """Put the small values back, and compute what `tensors` left out.

        Args:
            stored: what `read` returned at the snapshot's boundary; the tensors are already in place.
        """


MakeAdapter = Callable[[str, Any], StateAdapter]
"""(keyword in `wrap`, object) -> adapter; raises ConfigError with every problem of the object."""

_makers: dict[type, MakeAdapter] = {}
_forgetters: list[Callable[[], None]] = []

_PLUGINS = {
    "deepspeed.runtime.engine.DeepSpeedEngine": "from deadpool.plugins import deepspeed",
    "megatron.core.distributed.data_parallel_base._BaseDataParallel": "deadpool.plugins.megatron.wrap_step",
    "megatron.core.optimizer.optimizer.MegatronOptimizer": "deadpool.plugins.megatron.wrap_step",
}
"""Classes that would be taken for plain modules and captured wrongly, and how to load the plugin for each."""


def register_adapter(kind: type, make: MakeAdapter) -> None:
    """Let `wrap` take objects of `kind` and its subclasses."""
    _makers[kind] = make


def make_adapter(name: str, value: object) -> StateAdapter | None:
    """The adapter of an object given to `wrap`, or None if no plugin knows its class.

    Raises:
        ConfigError: a plugin knows it, and cannot protect it, or was not loaded; lists every problem.
    """
    for kind in type(value).__mro__:
        if kind in _makers:
            return _makers[kind](name, value)
        remedy = _PLUGINS.get(f"{kind.__module__}.{kind.__qualname__}")
        if remedy is not None:
            raise ConfigError(
                [f"{name}: a {type(value).__qualname__} needs its plugin; write `{remedy}` in the script"]
            )
    return None


def register_forgetter(forget: Callable[[], None]) -> None:
    """Have `forget` called whenever a parked spare has thrown a build of the script away.

    It puts what the framework keeps per process (groups, counters that name objects) back to where it was
    before the script ran: the next build must come out as on a rank that builds once.
    """
    if forget not in _forgetters:
        _forgetters.append(forget)


def forget_builds() -> None:
    """Call every forgetter."""
    for forget in _forgetters:
        forget()
