"""How handles get under stock ProcessGroups: the names of torch that are replaced while installed.

User code and frameworks keep asking for "gloo" or "nccl" and every table of torch.distributed stays stock.
What changes: the constructors that `distributed_c10d` looks up return a handle,
`ProcessGroup._register_backend` registers a handle as CUSTOM and has it built, and object collectives are
seen at their own level (object_calls.py).

Known gaps, because the registered type is CUSTOM: `split_group`, `shrink_group` and
`ProcessGroup._get_sequence_number_for_group` are refused by torch, `ProcessGroup.name()` is "custom".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed.distributed_c10d as distributed
from torch._C import _distributed_c10d as c10d

from deadpool.communicator import object_calls
from deadpool.communicator.extension import SwapBackend
from deadpool.errors import IntegrationError

_BackendType = c10d.ProcessGroup.BackendType


class HandleFactory(Protocol):
    """What the patches call."""

    def make_handle(self, kind: str, rank: int, size: int, options: c10d.Backend.Options) -> SwapBackend:
        """A new handle, not yet named or built."""

    def adopt(self, handle: SwapBackend) -> None:
        """Name the handle after its group, and build it. Called again for further devices: does nothing."""

    def object_broadcast(self, group: str, objects: list[Any], run: Callable[[], None]) -> None:
        """A broadcast_object_list that this rank sends: do `run`, or set the recorded objects."""


class TorchPatches:
    """Installed once per process; `remove()` restores torch."""

    def __init__(self, factory: HandleFactory) -> None:
        self._factory = factory
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Replace the names.

        Raises:
            IntegrationError: a debug mode of torch that puts its own backend between group and handle.
        """
        if distributed.get_debug_level() == distributed.DebugLevel.DETAIL:
            raise IntegrationError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL is not supported, its wrapper keeps a communicator; use INFO"
            )
        self._replace(distributed, "ProcessGroupGloo", self._shim("gloo", c10d.ProcessGroupGloo))
        if distributed.is_nccl_available():
            self._replace(distributed, "ProcessGroupNCCL", self._shim("nccl", c10d.ProcessGroupNCCL))
        self._replace(c10d.ProcessGroup, "_register_backend", self._registrar())
        for name, function in object_calls.wrapped(self._factory).items():
            self._replace(distributed, name, function)
            self._replace(torch.distributed, name, function)

    def remove(self) -> None:
        """Restore what `install` replaced."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, original))

    def _shim(self, kind: str, stock: Any) -> Any:
        """Stands where torch looks up a constructor: calls make handles, all else is the stock class."""
        factory = self._factory

        class Shim(type):
            def __call__(
                cls, store: Any, rank: int, size: int, options: Any = None, *, timeout: Any = None
            ) -> SwapBackend:
                if options is None:
                    options = c10d.Backend.Options(kind, timeout)
                handle = factory.make_handle(kind, rank, size, options)
                if hasattr(handle, "named"):  # the fallback: the group itself, which is never registered
                    handle.named = factory.adopt
                return handle

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, stock) or (
                    isinstance(instance, SwapBackend) and instance.kind == kind
                )

            def __getattr__(cls, name: str) -> Any:
                return getattr(stock, name)

        return Shim(stock.__name__, (), {})

    def _registrar(self) -> Callable[..., None]:
        factory = self._factory
        register = c10d.ProcessGroup._register_backend

        def _register_backend(
            self: Any, device: torch.device, backend_type: Any, backend: Any = None
        ) -> None:
            if isinstance(backend, SwapBackend):
                factory.adopt(backend)
                backend_type = _type_for(self, backend)
                if backend_type is _BackendType.CUSTOM:
                    self._set_default_backend(backend_type)
            register(self, device, backend_type, backend)

        return _register_backend


def _type_for(group: Any, handle: SwapBackend) -> Any:
    """Backend type to register under.

    Never the stock one: DDP's logger casts a GLOO backend to ProcessGroupGloo. A group's map from type to
    backend holds one each, so the CPU handle of a "cpu:gloo,cuda:nccl" group, whose default is NCCL, needs
    another type that is not in use.
    """
    if handle.kind == "gloo" and group.name() in ("nccl", "xccl"):
        return _BackendType.UCC
    return _BackendType.CUSTOM
