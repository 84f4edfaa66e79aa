"""Replaying a record on a spare: every collective of the constructor phase is answered without peers.

A call that differs from the record is an error that names both; what is most often behind it is a file
(a cache, a checkpoint) that did not exist when the record was made.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch._C import _distributed_c10d as c10d

from deadpool.communicator.echo import echo
from deadpool.communicator.extension import native
from deadpool.communicator.record import (
    CallRecord,
    GroupRecord,
    decode_record,
    describe,
    fill_tensor,
    set_rng,
    storages,
    tensor_digest,
)
from deadpool.errors import ReplayMismatch

T = TypeVar("T")

_CAUSE = (
    "the usual cause is a file, such as a cache or a checkpoint, that did not exist when the record was made"
)


@dataclass(slots=True)
class _Group:
    record: GroupRecord
    next_call: int = 0
    next_object: int = 0
    exists: bool = False


@dataclass(frozen=True, slots=True)
class _Echoed:
    """A large output that was echoed: harmless only if it is gone, restored later, or equal by chance."""

    where: str
    output: weakref.ref[torch.Tensor]
    digest: bytes


class Replayer:
    """Answers one rank's constructor phase from its record; sets the random generators when made."""

    def __init__(self, data: bytes, rank: int, world_size: int) -> None:
        record = decode_record(data)
        if (record.rank, record.world_size) != (rank, world_size):
            raise ReplayMismatch(
                f"the record is of rank {record.rank} of {record.world_size}, "
                f"this process is rank {rank} of {world_size}"
            )
        self._lock = threading.Lock()
        self._groups = {name: _Group(group) for name, group in record.groups.items()}
        self._store = {key: list(answers) for key, answers in record.store.items()}
        self._echoed: list[_Echoed] = []
        self._rng = record.rng
        set_rng(record.rng)

    def add_group(self, name: str, rank: int, size: int) -> None:
        """A group was made.

        Raises:
            ReplayMismatch: the record has no such group, or another one of that name.
        """
        group = self._groups.get(name)
        if group is None:
            raise ReplayMismatch(f"the script makes group '{name}', which the record does not have; {_CAUSE}")
        if (group.record.rank, group.record.size) != (rank, size):
            raise ReplayMismatch(
                f"group '{name}': rank {rank} of {size}, "
                f"in the record rank {group.record.rank} of {group.record.size}"
            )
        group.exists = True

    def on_call(
        self,
        group: str,
        op: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        root: int,
        issue: Callable[[], c10d.Work | None],
    ) -> c10d.Work:
        """The tap of a replaying handle."""
        where, call = self._next(group, op, outputs, root)
        kinds = describe(outputs)
        recorded = [(output.dtype, output.shape) for output in call.outputs]
        if call.outputs and kinds != recorded:
            raise ReplayMismatch(
                f"{where}: the script calls {op} {kinds}, the record has {recorded}; {_CAUSE}"
            )
        if call.echoed:
            rank, size = self._groups[group].record.rank, self._groups[group].record.size
            echo(op, outputs, inputs, rank, size)
            # Results inside a backward are gradients and their buckets: a restore drops them.
            if torch._C._current_graph_task_id() < 0:
                self._echoed += [
                    _Echoed(where, weakref.ref(tensor), output.digest)
                    for tensor, output in zip(outputs, call.outputs, strict=True)
                ]
        else:
            for tensor, output in zip(outputs, call.outputs, strict=True):
                fill_tensor(tensor, output.data or b"")
        return native.done_work(outputs, call.source_rank)

    def on_store(self, method: str, key: str, call: Callable[[], T]) -> T:
        """A call of the default store by the script."""
        if method == "set":
            return cast(T, None)
        answers = self._store.get(f"{method} {key}")
        if not answers:
            raise ReplayMismatch(f"store.{method}({key!r}) is not in the record; {_CAUSE}")
        return cast(T, answers.pop(0))

    def on_object_broadcast(self, group: str) -> list[Any]:
        """A broadcast_object_list that this rank sends; returns the objects of the record."""
        state = self._groups[group]
        with self._lock:
            if state.next_object >= len(state.record.objects):
                raise ReplayMismatch(
                    f"group '{group}': broadcast_object_list number {state.next_object} "
                    f"is not in the record; {_CAUSE}"
                )
            recorded = state.record.objects[state.next_object]
            if recorded.first != state.next_call:
                raise ReplayMismatch(
                    f"group '{group}': broadcast_object_list is call {state.next_call}, in the record call "
                    f"{recorded.first}; {_CAUSE}"
                )
            state.next_object += 1
            state.next_call += recorded.calls
        objects: list[Any] = pickle.loads(recorded.pickled)
        return objects

    def finish(self, protected: Iterable[torch.Tensor]) -> None:
        """End of the constructor phase.

        Args:
            protected: all tensors that a restore writes.

        Raises:
            ReplayMismatch: the script made fewer calls or groups than the record has, or keeps a large result
                that nobody restores.
        """
        problems = []
        for name, group in self._groups.items():
            left = len(group.record.calls) - group.next_call
            if not group.exists:
                problems.append(f"group '{name}' of the record was not made")
            elif left:
                call = group.record.calls[group.next_call]
                problems.append(f"group '{name}': {left} recorded calls were not made, first {call.op}")
        problems += [
            f"the store call '{key}' of the record was not made {len(answers)} times"
            for key, answers in self._store.items()
            if answers
        ]
        problems += self._unprotected(storages(list(protected)))
        if problems:
            raise ReplayMismatch("; ".join(problems[:20]) + f"; {_CAUSE}")

    def _next(self, group: str, op: str, outputs: list[torch.Tensor], root: int) -> tuple[str, CallRecord]:
        state = self._groups[group]
        with self._lock:
            index = state.next_call
            state.next_call += 1
        where = f"group '{group}', call {index}"
        if index >= len(state.record.calls):
            raise ReplayMismatch(
                f"{where}: the script calls {op} {describe(outputs)}, "
                f"the record ends after {len(state.record.calls)} calls; {_CAUSE}"
            )
        call = state.record.calls[index]
        if (call.op, call.root) != (op, root):
            raise ReplayMismatch(
                f"{where}: the script calls {op} (root {root}), "
                f"the record has {call.op} (root {call.root}); {_CAUSE}"
            )
        return where, call

    def _unprotected(self, protected: set[int]) -> list[str]:
        problems = []
        for echoed in self._echoed:
            tensor = echoed.output()
            if tensor is None or tensor.untyped_storage().data_ptr() in protected:
                continue
            if tensor_digest(tensor) != echoed.digest:
                problems.append(
                    f"{echoed.where}: its result {list(tensor.shape)} is still in use and no restore writes "
                    "it; give the object that holds it to wrap"
                )
        return problems
