"""Handles and works in Python: a ProcessGroup subclass that forwards to a stock gloo group.

torch takes a Python subclass only as a whole ProcessGroup, not as a backend under a stock one. C++ reaches
the calls of its trampoline (PyProcessGroup.hpp), everything else reaches this class from Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from deadpool.communicator.fallback.process import Entry, page
from deadpool.communicator.fallback.registry import raise_aborted, registry
from deadpool.communicator.fallback.work import SwapWork
from deadpool.errors import IntegrationError

_NO_ROOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One collective: where its tensors and its root stand among the arguments."""

    op: str  # as the extension calls it, in records and counters
    outputs: int | None = None
    inputs: int | None = None
    root: str | int | None = None  # attribute of the options, or position


_CALLS = {
    "broadcast": _Call(op="broadcast", outputs=0, root="rootRank"),
    "allreduce": _Call(op="allreduce", outputs=0, inputs=0),
    "allreduce_coalesced": _Call(op="allreduce_coalesced", outputs=0, inputs=0),
    "reduce": _Call(op="reduce", outputs=0, inputs=0, root="rootRank"),
    "allgather": _Call(op="allgather", outputs=0, inputs=1),
    "all_gather_single": _Call(op="all_gather_base", outputs=0, inputs=1),
    "_allgather_base": _Call(op="all_gather_base", outputs=0, inputs=1),
    "allgather_coalesced": _Call(op="allgather_coalesced", outputs=0, inputs=1),
    "all_gather_single_coalesced": _Call(op="allgather_into_tensor_coalesced", outputs=0, inputs=1),
    "allgather_into_tensor_coalesced": _Call(op="allgather_into_tensor_coalesced", outputs=0, inputs=1),
    "gather": _Call(op="gather", outputs=0, inputs=1, root="rootRank"),
    "scatter": _Call(op="scatter", outputs=0, inputs=1, root="rootRank"),
    "reduce_scatter": _Call(op="reduce_scatter", outputs=0, inputs=1),
    "reduce_scatter_single": _Call(op="reduce_scatter_base", outputs=0, inputs=1),
    "_reduce_scatter_base": _Call(op="reduce_scatter_base", outputs=0, inputs=1),
    "reduce_scatter_single_coalesced": _Call(op="reduce_scatter_tensor_coalesced", outputs=0, inputs=1),
    "reduce_scatter_tensor_coalesced": _Call(op="reduce_scatter_tensor_coalesced", outputs=0, inputs=1),
    "all_to_all_single": _Call(op="alltoall_base", outputs=0, inputs=1),
    "alltoall_base": _Call(op="alltoall_base", outputs=0, inputs=1),
    "alltoall": _Call(op="alltoall", outputs=0, inputs=1),
    "send": _Call(op="send", inputs=0, root=1),
    "recv": _Call(op="recv", outputs=0, root=1),
    "recv_anysource": _Call(op="recv_anysource", outputs=0),
    "barrier": _Call(op="barrier"),
    "monitored_barrier": _Call(op="monitored_barrier"),
}


class SwapBackend(c10d.ProcessGroup):
    """A handle, as `_native.SwapBackend`; and at the same time the process group itself."""

    def __init__(self, rank: int, size: int, kind: str, options: c10d.Backend.Options) -> None:
        if kind != "gloo":
            raise IntegrationError(
                f"a group of kind '{kind}' needs the C++ extension of DeadPool, which is not built here: "
                "install a C++ compiler and install DeadPool again"
            )
        super().__init__(rank, size)  # type: ignore[call-arg] # the one form a subclass can use
        self.kind = kind
        self.options = options
        self.handle_name = "unnamed"
        self.generation = 0
        self.is_shut_down = False
        self.named: Callable[[SwapBackend], None] = lambda handle: None  # torch has given it its name
        self._entry = Entry.private()
        self._desc = ""
        self._lock = threading.Lock()
        self._inner: c10d.ProcessGroup | None = None
        self._sockets: set[int] = set()
        self._lines: dict[tuple[int, int], Entry] = {}
        self._tap: Callable[..., c10d.Work | None] | None = None
        registry.add(self)

    # ---- the interface of _native.SwapBackend ----

    def set_name(self, name: str) -> None:
        """Once, before it is built."""
        self.handle_name = name
        self._entry = page.add_entry(name)

    def set_tap(self, tap: Callable[..., c10d.Work | None] | None) -> None:
        self._tap = tap

    def set_nccl_raw(self, address: int) -> None:
        raise IntegrationError(
            "NCCL needs the C++ extension of DeadPool; no handle of that kind is made here"
        )

    def inner(self) -> c10d.ProcessGroup | None:
        return self._inner

    @property
    def issued(self) -> int:
        return self._entry.words[1]

    @property
    def completed(self) -> int:
        return self._entry.words[2]

    def set_inner(self, communicator: c10d.Backend, sockets: set[int], generation: int) -> None:
        """Begin to use a gloo communicator, through a stock group: that one has all forms of all calls."""
        group = c10d.ProcessGroup(c10d.HashStore(), self.rank(), self.size())
        group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, communicator)
        with self._lock:
            self._inner, self._sockets, self.generation = group, sockets, generation
            for entry in (self._entry, *self._lines.values()):
                entry.reset()

    def take_inner(self, generation: int) -> tuple[c10d.ProcessGroup | None, set[int]]:
        with self._lock:
            if self.generation > generation:
                return None, set()
            taken = self._inner, self._sockets
            self._inner, self._sockets = None, set()
            return taken

    # ---- what torch asks of a group beside collectives; the base class would ask a backend ----

    def shutdown(self) -> None:
        self.is_shut_down = True
        if self._inner is not None:
            self._inner.shutdown()

    def abort(self) -> None:
        """Nobody but DeadPool aborts."""

    def name(self) -> str:
        return "custom"

    def getBackendName(self) -> str:
        return "custom"  # not gloo: DDP's logger would cast it

    def _set_group_name(self, name: str) -> None:
        self.options.group_name = name  # type: ignore[assignment]
        self.named(self)

    @property
    def group_name(self) -> Any:
        return self.options.group_name

    def getGroupName(self) -> str:
        return str(self.options.group_name)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Done for each communicator when it is built."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    set_timeout = _set_default_timeout
    supports_coalescing = supports_splitting = supports_time_estimate = False

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        raise IntegrationError("split_group is not supported; use new_group")

    # ---- collectives ----

    def _dispatch(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> c10d.Work | None:
        call = _CALLS[name]
        root = self._root(call, args, kwargs)
        entry = self._entry_for(call.op, root)
        outputs = _flat(args[call.outputs]) if call.outputs is not None else []
        inputs = _flat(args[call.inputs]) if call.inputs is not None else []

        def issue() -> c10d.Work | None:
            inner, generation = self._live()
            entry.issue(call.op, max(_count_bytes(outputs), _count_bytes(inputs)))
            try:
                work: c10d.Work | None = getattr(inner, name)(*args, **kwargs)
            except Exception as error:
                if generation <= registry.closed_generation():
                    raise_aborted(self.handle_name, generation, f"{call.op} was aborted ({error})")
                raise
            if work is None:
                entry.complete()
                return None
            return SwapWork(work, self.handle_name, generation, entry)

        tap = self._tap
        if tap is None:
            return issue()
        return tap(self.handle_name, call.op, outputs, inputs, root, issue)

    def _root(self, call: _Call, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        if call.root is None:
            return _NO_ROOT
        if isinstance(call.root, int):
            return int(args[call.root])
        return int(getattr(kwargs.get("opts", args[-1]), call.root, _NO_ROOT))

    def _entry_for(self, op: str, peer: int) -> Entry:
        """Where an operation is counted; see SwapBackend::entry_for in csrc/backend.cpp."""
        if op not in ("send", "recv", "recv_anysource"):
            return self._entry
        if peer < 0:
            return Entry.private()
        line = (self.rank(), peer) if op == "send" else (peer, self.rank())
        with self._lock:
            if line not in self._lines:
                self._lines[line] = page.add_entry(f"{self.handle_name}/{line[0]}>{line[1]}")
            return self._lines[line]

    def _live(self) -> tuple[c10d.ProcessGroup, int]:
        with self._lock:
            inner, generation = self._inner, self.generation
        if inner is None or generation <= registry.closed_generation():
            raise_aborted(self.handle_name, generation, "closed" if generation else "not connected yet")
        return inner, generation


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: SwapBackend, *args: Any, **kwargs: Any) -> Any:
        return self._dispatch(name, args, kwargs)

    method.__name__ = name
    return method


for _name in _CALLS:
    setattr(SwapBackend, _name, _forwarding(_name))


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)]


def _count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
