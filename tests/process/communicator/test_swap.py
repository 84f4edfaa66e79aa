"""Closing and rebuilding communicators under live handles, with real processes."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool.communicator.rendezvous import RendezvousStore
from deadpool.communicator.rendezvous_wire import Op, Reply
from deadpool.errors import CollectiveAborted, IntegrationError, RebuildTimeout
from tests.process.communicator.cluster import (
    START_S,
    TOKEN,
    Cluster,
    Seat,
    all_reduce_value,
    gap_of_the_fallback,
    run_all,
)

PROMPT_S = 10.0
"""Far below the 120 s timeout of collectives, far above what a close takes on busy cores."""


# ---- one rank dies or stops ----


def lose_a_peer(seat: Seat) -> dict[str, Any]:
    communicators = seat.communicators()
    communicators.start_recording()
    communicators.init_process_group(seat.store(1))
    seat.tell("joined", communicators.finish_recording())
    victim = seat.hear()
    if seat.rank == victim:
        seat.tell("waiting")
        seat.hear()
    try:
        for _ in range(2):  # the victim takes part in none
            dist.all_reduce(torch.ones(1 << 16))
        error = "none"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        found = communicators.failed_collective(raised)
    seat.tell("raised", error)
    seat.hear()
    communicators.open(2, seat.store(2))
    communicators.reap()
    total = all_reduce_value(seat.rank)
    seat.meet("end")
    return {"sum": total, "was_collective": found}


def take_over(seat: Seat) -> dict[str, Any]:
    communicators = seat.communicators()
    communicators.start_replay(seat.hear())
    communicators.init_process_group(None)
    communicators.finish_replay([])
    communicators.open(2, seat.store(2))
    total = all_reduce_value(seat.rank)
    seat.meet("end")
    return {"sum": total}


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_leave_a_collective_and_go_on_with_a_replacement(kind: signal.Signals) -> None:
    victim = 1
    with Cluster(3) as cluster:
        workers = cluster.start_all(lose_a_peer)
        records = [worker.wait("joined", START_S) for worker in workers]
        workers[victim].say(victim)
        workers[victim].wait("waiting")
        survivors = [workers[0], workers[2]]
        for worker in survivors:
            worker.say(victim)
        workers[victim].signal(kind)
        for worker in survivors:
            worker.order_close(1)
            worker.wait_closed(1, PROMPT_S)
            error = worker.wait("raised", PROMPT_S)
            assert error != "none"
            # Of a stopped victim nobody hears. The other survivor may see the first one's connection go.
            if kind is signal.SIGSTOP and worker is survivors[0]:
                assert error.startswith("CollectiveAborted: group '0', generation 1")
            assert worker.field(16) == 1
        cluster.server.set_generation(2)
        replacement = cluster.start(take_over, victim)
        replacement.say(records[victim])
        for worker in survivors:
            worker.say()
        results = [worker.wait("result", START_S) for worker in [*survivors, replacement]]
    assert [result["sum"] for result in results] == [3.0] * 3
    assert all(result["was_collective"] for result in results[:2])


# ---- closing ----


HELD_US = 4_000_000


def hold_the_gil(seat: Seat) -> dict[str, Any]:
    communicators = seat.join()
    seat.tell("joined")
    seat.hear()
    if seat.rank == 0:
        libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL
        began = time.monotonic()
        libc.usleep(HELD_US)
        held_s = time.monotonic() - began
    else:
        held_s = 0.0
    closed = communicators.closed_generation
    try:
        dist.all_reduce(torch.ones(1))
        error = "none"
    except CollectiveAborted as raised:
        error = str(raised)
    return {"held_s": held_s, "closed": closed, "error": error}


@gap_of_the_fallback("an abort waits for the GIL", raises=TimeoutError)
def test_a_held_gil_does_not_delay_a_close() -> None:
    with Cluster(2) as cluster:
        workers = cluster.start_all(hold_the_gil)
        for worker in workers:
            worker.wait("joined", START_S)
            worker.say()
        time.sleep(0.5)  # the sleep of rank 0 is well under way; nothing waits for this
        for worker in workers:
            worker.order_close(1)
        workers[0].wait_closed(1, 2.5)
        results = [worker.wait("result") for worker in workers]
    assert results[0]["held_s"] > 3.5
    assert results[0]["closed"] == 1
    assert "generation 1: closed" in results[0]["error"]


@gap_of_the_fallback("a worker that holds the GIL looks stopped", raises=AssertionError)
def test_a_held_gil_does_not_stop_the_tick() -> None:
    with Cluster(1) as cluster:
        worker = cluster.start(hold_the_gil, 0)
        worker.wait("joined", START_S)
        worker.say()
        time.sleep(0.5)  # as above
        ticks = worker.field(8)
        time.sleep(1.0)  # a quiet second is what is measured
        assert worker.field(8) > ticks + 3
        worker.order_close(1)
        worker.wait_closed(1)
        assert worker.wait("result")["held_s"] > 2.0


def close_in_many_ways(seat: Seat) -> dict[str, Any]:
    communicators = seat.join()
    frozen_before = communicators.frozen()
    subgroup = dist.new_group([0, 1])
    all_reduce_value(1.0, subgroup)
    seat.meet("before close")
    communicators.close(1)
    errors = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), group=subgroup),
        lambda: dist.barrier(),
        lambda: dist.new_group([0, 1]),
        lambda: communicators.open(1, seat.store(1)),
    ):
        try:
            call()
            errors.append("none")
        except CollectiveAborted as error:
            errors.append(str(error))
    frozen = communicators.frozen()
    communicators.open(2, seat.store(2))
    communicators.close(1)  # late news of an older generation change nothing
    after = all_reduce_value(1.0, subgroup)
    seat.meet("end")
    names = [(handle.name, handle.generation) for handle in communicators.handles()]
    return {
        "errors": errors,
        "frozen": (frozen_before, frozen, communicators.frozen()),
        "after": after,
        "handles": names,
    }


def test_a_closed_generation_refuses_everything_until_the_next_is_open() -> None:
    for result in run_all(close_in_many_ways, 2):
        assert "none" not in result["errors"]
        assert "group '0', generation 1" in result["errors"][0]
        assert "group '1', generation 1" in result["errors"][1]
        assert result["frozen"] == (False, True, False)
        assert result["after"] == 2.0
        assert result["handles"] == [("0", 2), ("1", 2)]


def wait_for_ever(seat: Seat) -> None:
    seat.join()
    seat.tell("joined")
    threading.Event().wait(60)


def test_a_worker_ends_at_once_when_its_agent_is_gone() -> None:
    with Cluster(1) as cluster:
        worker = cluster.start(wait_for_ever, 0)
        worker.wait("joined", START_S)
        worker.hang_up()
        assert worker.exit_code(PROMPT_S) == 73


def make_a_group_in_train(seat: Seat) -> dict[str, Any]:
    """What a survivor does: it enters `train` twice."""
    communicators = seat.join()
    kept = dist.new_group([0, 1])
    communicators.settle_groups(later_allowed=True)
    first = dist.new_group([0, 1])
    all_reduce_value(1.0, first)
    seat.meet("trained")
    communicators.close(1)
    communicators.open(2, seat.store(2))
    try:
        all_reduce_value(1.0, first)
        error = "none"
    except (ValueError, RuntimeError) as raised:
        error = str(raised)
    second = dist.new_group([0, 1])
    values = all_reduce_value(1.0, kept), all_reduce_value(2.0, second)
    names = [handle.name for handle in communicators.handles()]
    seat.meet("end")
    return {"error": error, "values": values, "names": names, "second": str(second.group_name)}


def test_groups_made_in_train_end_with_their_generation_and_are_named_alike_when_made_anew() -> None:
    for result in run_all(make_a_group_in_train, 2):
        assert result["error"] != "none"
        assert result["values"] == (2.0, 4.0)
        # A spare has made one group when it enters `train`: the next one is number 2 there, too.
        assert result["names"] == ["0", "1", "2"]
        assert result["second"] == "2"


def make_a_group_in_a_step(seat: Seat) -> str:
    communicators = seat.join()
    communicators.settle_groups(later_allowed=False)
    try:
        dist.new_group([0, 1])
    except IntegrationError as error:
        return f"{error}, {[handle.name for handle in communicators.handles()]}"
    return "none"


def test_a_group_made_in_a_wrapped_step_is_refused_with_the_remedy() -> None:
    for result in run_all(make_a_group_in_a_step, 2):
        assert "make all groups before, ['0']" in result


# ---- half-built ----


class LateStore(RendezvousStore):
    """Lets its rank tell its address, then holds it back: its peers sit in gloo's constructor."""

    def __init__(self, seat: Seat, generation: int) -> None:
        super().__init__("127.0.0.1", seat.port, token=TOKEN, generation=generation, timeout_s=30)
        self.seat = seat

    def _wait_for(self, op: Op, keys: Sequence[str], timeout_s: float) -> Reply:
        if not any("/gate/" in key for key in keys):
            self.seat.tell("stuck")
            self.seat.hear()
        return super()._wait_for(op, keys, timeout_s)


def build_against_a_late_peer(seat: Seat) -> float:
    communicators = seat.join()
    communicators.close(1)
    store = LateStore(seat, 2) if seat.rank == 1 else seat.store(2)
    seat.tell("opening")
    try:
        communicators.open(2, store, timeout_s=60)
        dist.all_reduce(torch.ones(1))  # if rank 0 was the one to connect, it is through the constructor
        error = "none"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seat.tell("left", error)
    seat.hear()
    communicators.open(3, seat.store(3))
    total = all_reduce_value(seat.rank)
    seat.meet("end")
    return total


def test_a_close_reaches_communicators_that_are_half_built() -> None:
    with Cluster(2) as cluster:
        workers = cluster.start_all(build_against_a_late_peer)
        for worker in workers:
            worker.wait("opening", START_S)
        workers[1].wait("stuck")
        for worker in workers:
            worker.order_close(2)
        for worker in workers:
            worker.wait_closed(2, PROMPT_S)
        assert workers[0].wait("left", PROMPT_S).startswith("CollectiveAborted")
        assert workers[1].wait("left", PROMPT_S).startswith("CollectiveAborted")
        for worker in workers:
            worker.say()  # to the held-back thread, and to the rank
        workers[1].say()
        assert [worker.wait("result") for worker in workers] == [1.0, 1.0]


def rebuild_alone(seat: Seat) -> str:
    communicators = seat.join()
    if seat.rank == 2:
        return "absent"
    meeting = seat.store(2)
    meeting.set(f"about to open/{seat.rank}", "1")
    meeting.wait(["about to open/0", "about to open/1"])
    meeting.close()
    try:
        communicators.open(2, seat.store(2), timeout_s=2.0)
    except RebuildTimeout as error:
        return str(error)
    return "none"


def test_a_rebuild_without_a_peer_ends_at_its_deadline_and_names_it() -> None:
    results = run_all(rebuild_alone, 3)
    assert "ranks [2] did not come" in results[0]
    assert "ranks [2] did not come" in results[1]


# ---- resources and ends ----


def swap_many_times(seat: Seat) -> list[tuple[int, int]]:
    communicators = seat.join()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 1, 2])]
    counts = []
    for generation in range(2, 12):
        seat.meet(f"before {generation}")
        work = dist.all_reduce(torch.ones(1 << 14), async_op=True) if seat.rank != generation % 3 else None
        communicators.close(generation - 1)
        if work is not None:
            with pytest.raises(CollectiveAborted):
                work.wait()
        del work
        communicators.open(generation, seat.store(generation))
        assert all_reduce_value(1.0) == 3.0
        assert all_reduce_value(1.0, groups[2]) == 3.0
        communicators.reap()
        for thread in threading.enumerate():
            if thread.name == "deadpool-reaper":
                thread.join(10)
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def test_ten_swaps_leave_no_descriptor_and_no_thread_behind() -> None:
    for counts in run_all(swap_many_times, 3):
        # A connection may be on its way to its end when it is counted; what leaks is there every time.
        assert min(fds for fds, _ in counts[-3:]) <= max(fds for fds, _ in counts[:3]), counts
        assert min(threads for _, threads in counts[-3:]) <= max(threads for _, threads in counts[:3]), counts


def end_properly(seat: Seat) -> None:
    communicators = seat.join()
    dist.new_group([0, 1])
    dist.barrier()
    seat.meet("end")
    dist.destroy_process_group()
    assert communicators.handles() == []


def end_without_goodbye(seat: Seat) -> None:
    seat.join()
    all_reduce_value(1.0)
    seat.meet("end")


@pytest.mark.parametrize("scenario", [end_properly, end_without_goodbye])
def test_a_script_ends_without_a_crash(scenario: Any) -> None:
    run_all(scenario, 2)
