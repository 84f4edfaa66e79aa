"""Recording a rank's constructor phase: each collective runs as always, and what it returned is kept.

What is kept: outputs up to 64 KiB; everything inside an object collective; larger ones that hold integers,
unless they alias a parameter or buffer. Other large outputs are parameters, buffers or gradients: a restore
overwrites them, so a replay echoes them locally and only their digest is kept.

Not caught: a large float result that was turned into a Python number and freed before `wrap`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C import _distributed_c10d as c10d
from torch.nn.modules import module as torch_module

from deadpool.communicator import object_calls
from deadpool.communicator.extension import native
from deadpool.communicator.record import (
    FORMAT,
    CallRecord,
    ConstructorRecord,
    GroupRecord,
    ObjectCall,
    StoreAnswer,
    TensorRecord,
    describe,
    encode_record,
    get_rng,
    storages,
    tensor_bytes,
    tensor_digest,
)
from deadpool.errors import IntegrationError

T = TypeVar("T")

SMALL_BYTES = 65536
"""Outputs up to this size are kept. Measured per rank: DDP 0.7 KB, ZeRO-3 264 KB, megatron-core 167 KB."""

LARGE_BYTES = 1 << 26
"""Integer outputs above this size are echoed like floats: a record must stay small beside the state."""

_LATE_S = 30.0
"""How long `finish` waits for a collective that nobody has waited for."""


class Recorder:
    """Records one rank from `start` to `finish`; safe to use from several threads."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._rng = get_rng()
        self._lock = threading.Lock()
        self._groups: dict[str, GroupRecord] = {}
        self._store: dict[str, list[StoreAnswer]] = {}
        self._unfinished: dict[int, tuple[str, CallRecord, c10d.Work]] = {}  # id(call) -> its work
        self._registered = _RegisteredTensors()

    def add_group(self, name: str, rank: int, size: int) -> None:
        """A group was made."""
        with self._lock:
            self._groups[name] = GroupRecord(rank=rank, size=size)

    def on_call(
        self,
        group: str,
        op: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        root: int,
        issue: Callable[[], c10d.Work | None],
    ) -> c10d.Work | None:
        """The tap of a recorded handle."""
        call = CallRecord(op=op, root=root, echoed=not self._keeps(outputs), outputs=[])
        with self._lock:
            self._groups[group].calls.append(call)
        work = issue()
        if work is None or not outputs:
            return work
        # Captured when its owner waits, never at once: waiting here for a receive would hang a pipeline
        # schedule, whose matching send comes later in this very thread.
        work = native.watch_work(work, lambda source: self._capture(call, outputs, source))
        with self._lock:
            self._unfinished[id(call)] = (group, call, work)
        return work

    def on_store(self, method: str, key: str, call: Callable[[], T]) -> T:
        """A call of the default store by the script."""
        answer = call()
        if method == "set":
            return answer  # says nothing to the script
        with self._lock:
            self._store.setdefault(f"{method} {key}", []).append(answer)  # type: ignore[arg-type]
        return answer

    def on_object_broadcast(self, group: str, run: Callable[[], bytes]) -> None:
        """A broadcast_object_list that this rank sends; `run` does it and returns the pickled objects."""
        with self._lock:
            first = len(self._groups[group].calls)
        pickled = run()
        with self._lock:
            record = self._groups[group]
            record.objects.append(ObjectCall(first=first, calls=len(record.calls) - first, pickled=pickled))

    def finish(self) -> bytes:
        """End of the constructor phase.

        Raises:
            IntegrationError: a receive was posted and nothing has arrived: no spare could replay that.
        """
        with self._lock:
            unfinished = list(self._unfinished.values())
        for group, call, work in unfinished:
            try:
                work.wait(timedelta(seconds=_LATE_S))
            except RuntimeError as error:
                raise IntegrationError(
                    f"rank {self._rank}: {call.op} on group '{group}' was issued before wrap and has not "
                    "completed; wait for it before deadpool.wrap"
                ) from error
        self._registered.close()
        return encode_record(
            ConstructorRecord(
                format=FORMAT,
                rank=self._rank,
                world_size=self._world_size,
                rng=self._rng,
                groups=self._groups,
                store=self._store,
            )
        )

    def close(self) -> None:
        """Drop the record."""
        self._registered.close()
        self._unfinished.clear()

    def _keeps(self, outputs: list[torch.Tensor]) -> bool:
        size = sum(tensor.nbytes for tensor in outputs)
        if size <= SMALL_BYTES or object_calls.is_inside():
            return True
        is_state = all(
            tensor.is_floating_point() or tensor.is_complex() or self._registered.alias(tensor)
            for tensor in outputs
        )
        return not is_state and size <= LARGE_BYTES

    def _capture(self, call: CallRecord, outputs: list[torch.Tensor], source_rank: int) -> None:
        kinds = describe(outputs)
        call.source_rank = source_rank
        call.outputs = [
            TensorRecord(dtype=dtype, shape=shape, digest=tensor_digest(tensor))
            if call.echoed
            else TensorRecord(dtype=dtype, shape=shape, data=tensor_bytes(tensor))
            for (dtype, shape), tensor in zip(kinds, outputs, strict=True)
        ]
        with self._lock:
            self._unfinished.pop(id(call), None)


class _RegisteredTensors:
    """Every parameter and buffer that a module registers, to tell state from other integers.

    DeepSpeed broadcasts `p.data.view(torch.uint8)`: such a view names no base, only its storage tells.
    """

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._storages: set[int] = set()
        self._hooks = [
            torch_module.register_module_parameter_registration_hook(self._note),
            torch_module.register_module_buffer_registration_hook(self._note),
        ]

    def alias(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        if address in self._storages:
            return True
        live = [known for known in (ref() for ref in list(self._tensors)) if known is not None]
        self._storages = storages(live)
        return address in self._storages

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._tensors.clear()

    def _note(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            self._tensors.append(weakref.ref(tensor))
