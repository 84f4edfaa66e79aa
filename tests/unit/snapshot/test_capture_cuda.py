"""The order of a capture from a device, on a lane that copies when it is told to.

The lane stands for the side stream of a GPU: copies are enqueued and run later. The rest is our own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from deadpool.snapshot.capture import bank_tensors
from deadpool.snapshot.capture_cuda import CudaCapture, Event
from deadpool.snapshot.stateful import layout_of
from tests.unit.snapshot.support import DEADLINE_S, make_bank
from tests.unit.snapshot.test_capture import make_state


class Done(threading.Event):
    """The event of one copy."""

    def __init__(self, copy: Callable[[], None]) -> None:
        super().__init__()
        self.copy = copy

    def query(self) -> bool:
        return self.is_set()

    def synchronize(self) -> None:
        assert self.wait(DEADLINE_S)


class ManualLane:
    """Says what it was asked to do, and copies in `run`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._pending: list[Done] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def pin(self, area: memoryview) -> int:
        self.asked.append("pin")
        return 0

    def unpin(self, address: int) -> None:
        self.asked.append("unpin")

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Event:
        self.asked.append("copy")
        done = Done(lambda: torch._foreach_copy_(list(targets), list(sources)))
        self._pending.append(done)
        return done

    def hold_compute(self, event: Event) -> None:
        self.asked.append("hold compute")

    def run(self) -> None:
        for done in self._pending:
            done.copy()
            done.set()
        self._pending.clear()


class Rig:
    """A capture of plain tensors over a manual lane."""

    def __init__(self) -> None:
        state, self.tensors = make_state()
        self.layout = layout_of(state)
        self.banks = [make_bank(self.layout), make_bank(self.layout)]
        self.lane = ManualLane()
        self.is_frozen = False
        self.ended: list[tuple[int, str | None]] = []
        self.capture = CudaCapture(
            self.layout,
            state.tensors,
            self.banks,
            on_done=lambda bank, reason: self.ended.append((bank, reason)),
            frozen=lambda: self.is_frozen,
            lane=self.lane,
        )

    def finish(self) -> None:
        self.lane.run()
        assert self.capture.drain(DEADLINE_S)


@contextmanager
def rigged() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.lane.run()
        rig.capture.close()


def test_nothing_is_reported_before_the_event_of_the_copy() -> None:
    with rigged() as rig:
        rig.capture.start(0)
        assert not rig.capture.drain(0.05)
        assert rig.ended == []
        rig.finish()
        assert rig.ended == [(0, None)]
        held = bank_tensors(rig.layout, *rig.banks[0])
        assert all(torch.equal(copy, live) for copy, live in zip(held, rig.tensors, strict=True))


def test_a_copy_that_ends_after_the_freeze_does_not_count() -> None:
    with rigged() as rig:
        rig.capture.start(1)
        rig.is_frozen = True  # handles were closed; the garbage of an aborted step may be in the copy
        rig.finish()
        (bank, reason), *_ = rig.ended
        assert bank == 1 and reason is not None and reason.startswith("frozen")


def test_the_next_step_is_ordered_behind_the_copy_and_its_thread_does_not_wait() -> None:
    with rigged() as rig:
        rig.capture.start(0)
        rig.capture.wait()  # would hang if it waited for the copy
        assert rig.lane.asked[-2:] == ["copy", "hold compute"]
        assert rig.capture.stats.waits == 1
        for tensor in rig.tensors:
            tensor.add_(1.0)  # enqueued behind the copy: a change that does not tear it
        rig.finish()
        assert rig.ended == [(0, None)]


def test_a_copy_that_has_ended_holds_nobody_up() -> None:
    with rigged() as rig:
        rig.capture.start(0)
        rig.finish()
        rig.capture.wait()
        assert "hold compute" not in rig.lane.asked
        assert rig.capture.stats.waits == 0


def test_a_change_that_was_enqueued_before_the_wait_is_found() -> None:
    with rigged() as rig:
        rig.capture.start(0)
        rig.tensors[2].add_(1.0)
        rig.capture.wait()
        rig.finish()
        assert rig.ended[0][1] is not None and rig.ended[0][1].startswith("t2 changed while copied")


def test_pinned_memory_is_given_back_at_the_end() -> None:
    with rigged() as rig:
        pinned = rig.lane.asked.count("pin")
        assert pinned > 0
    assert rig.lane.asked.count("unpin") == pinned
