"""What callers of collectives see: errors of an abort, waits, counters, and the hook before each call."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deadpool.communicator.extension import native
from deadpool.errors import CollectiveAborted
from tests.process.communicator.cluster import (
    EVENT_S,
    START_S,
    Cluster,
    Seat,
    all_reduce_value,
    gap_of_the_fallback,
    run_all,
)


def abort_inside_backward(seat: Seat) -> str:
    communicators = seat.join()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    seat.tell("trained")
    seat.hear()
    if seat.rank == 1:
        communicators.close(1)
        return "gone"
    try:
        model(torch.ones(2, 64)).sum().backward()  # issued on a live or closed handle, by C++
        return "none"
    except CollectiveAborted as error:
        return str(error)


def test_an_abort_inside_a_backward_reaches_python_as_the_right_error() -> None:
    with Cluster(2) as cluster:
        workers = cluster.start_all(abort_inside_backward)
        for worker in workers:
            worker.wait("trained", START_S)
        workers[0].order_close(1)
        workers[0].wait_closed(1)
        for worker in workers:
            worker.say()
        assert "group '0', generation 1" in workers[0].wait("result")


def fail_inside_backward(seat: Seat) -> str:
    communicators = seat.join()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.ones(2, 64)).sum().backward()
    seat.tell("trained")
    seat.hear()
    if seat.rank == 1:
        seat.hear()
        return "gone"

    def issued() -> int:
        return sum(handle.issued for handle in communicators.handles())

    before = issued()

    def close_in_flight() -> None:
        deadline_s = time.monotonic() + EVENT_S
        while issued() == before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        communicators.close(1)

    threading.Thread(target=close_in_flight, daemon=True).start()
    try:
        model(torch.ones(2, 64)).sum().backward()  # rank 1 never joins: in flight until the close
        return "none"
    except CollectiveAborted as error:
        return str(error)


def test_a_collective_in_flight_inside_a_backward_fails_with_the_right_error() -> None:
    with Cluster(2) as cluster:
        workers = cluster.start_all(fail_inside_backward)
        for worker in workers:
            worker.wait("trained", START_S)
            worker.say()
        assert "the collective was aborted" in workers[0].wait("result")
        workers[1].say()


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1 << 14), async_op=True),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(10), torch.ones(20), async_op=True),
    "receive": lambda: dist.irecv(torch.ones(10), 1),
}
"""One of each kind of work: with a future, without one, point to point."""


def wait_for_a_late_peer(seat: Seat) -> dict[str, Any]:
    """Rank 1 comes late to the first round and never to the second, in which rank 0 is closed."""
    communicators = seat.join()
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        if seat.rank == 1:
            seat.hear()
            if name == "receive":
                dist.send(torch.ones(10), 0)
            else:
                call().wait()
            continue
        work = call()
        seat.tell("issued", name)
        work.wait()
        found[name] = "done"
    seat.tell("second round")
    seat.hear()
    if seat.rank == 1:
        seat.hear()  # alive, and silent
        return found
    works = {name: call() for name, call in CALLS.items()}
    threading.Timer(0.2, communicators.close, [1]).start()
    for name, work in works.items():
        try:
            work.wait()
        except CollectiveAborted as error:
            found[name] = str(error)
    return found


def test_every_kind_of_work_waits_for_a_late_peer_and_ends_at_a_close() -> None:
    with Cluster(2) as cluster:
        waiting, late = cluster.start_all(wait_for_a_late_peer)
        for name in CALLS:
            assert waiting.wait("issued", START_S) == name
            time.sleep(0.3)  # longer than one slice of a wait; nothing else depends on it
            late.say()
        for worker in (waiting, late):
            worker.wait("second round")
            worker.say()
        found = waiting.wait("result")
        late.say()
    assert sorted(found) == ["all_reduce", "receive", "reduce_scatter"]
    assert all("group '0', generation 1: the collective was aborted" in text for text in found.values())


def wait_for_a_future(seat: Seat) -> str:
    communicators = seat.join()
    seat.meet("joined")
    if seat.rank == 1:
        seat.hear()  # alive, and silent
        return ""
    future = dist.all_reduce(torch.ones(5), async_op=True).get_future()
    threading.Timer(0.2, communicators.close, [1]).start()
    try:
        future.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def end_a_future() -> str:
    with Cluster(2) as cluster:
        waiting, silent = cluster.start_all(wait_for_a_future)
        ended: str = waiting.wait("result", START_S)
        silent.say()
    return ended


def test_a_future_ends_at_a_close() -> None:
    assert "group '0', generation 1: the collective was aborted" in end_a_future()


@gap_of_the_fallback("errors of futures are RuntimeErrors", raises=AssertionError)
def test_a_future_ends_with_the_right_error() -> None:
    assert end_a_future().startswith("CollectiveAborted: ")


def fail_in_a_backward_whose_peer_dies(seat: Seat) -> str:
    seat.join()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.ones(2, 64)).sum().backward()
    seat.tell("trained")
    seat.hear()
    try:
        model(torch.ones(2, 64)).sum().backward()  # the connection is reset, and nobody has closed
        return "none"
    except RuntimeError as error:
        return str(error)


def test_a_backward_whose_peer_dies_raises_before_any_close() -> None:
    with Cluster(2) as cluster:
        survivor, victim = cluster.start_all(fail_in_a_backward_whose_peer_dies)
        for worker in (survivor, victim):
            worker.wait("trained", START_S)
        survivor.say()  # in its backward, or about to be
        victim.signal(signal.SIGKILL)
        assert "onnection" in survivor.wait("result", START_S)


def count_calls(seat: Seat) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    communicators = seat.join()
    subgroup = dist.new_group([0, 1])
    for _ in range(5):
        all_reduce_value(1.0)
    all_reduce_value(1.0, subgroup)
    if seat.rank == 0:
        dist.send(torch.ones(3), 1)
        work = dist.all_reduce(torch.ones(500), async_op=True)
        seat.tell("waits")
        seat.hear()
        assert work is not None
        work.wait()
    else:
        dist.recv(torch.ones(3), 0)
        seat.tell("waits")
        seat.hear()
        dist.all_reduce(torch.ones(500))
    dist.barrier()
    seat.meet("end")
    counts = {handle.name: (handle.issued, handle.completed) for handle in communicators.handles()}
    return counts, communicators.describe_groups()


def newest(operation: str, n_bytes: int) -> int:
    """A call as an entry of the page holds it."""
    return (native.name_hash(operation) & 0xFFFF) << 48 | n_bytes


def test_the_agent_sees_who_has_not_issued_what_others_wait_for() -> None:
    with Cluster(2) as cluster:
        workers = cluster.start_all(count_calls)
        for worker in workers:
            worker.wait("waits", START_S)
        waiting, culprit = (worker.entries() for worker in workers)
        # Sends and receives are counted per line from rank to rank, alike on both sides.
        names = ["0", "1", "0/0>1"]
        assert [entry[0] for entry in waiting] == [native.name_hash(name) for name in names]
        assert waiting[0][1:] == (6, 5, newest("allreduce", 2000))
        assert culprit[0][1:] == (5, 5, newest("allreduce", 4000))
        assert waiting[1][1:] == culprit[1][1:] == (1, 1, newest("allreduce", 4000))
        assert waiting[2][1:] == (1, 1, newest("send", 12))
        assert culprit[2][1:] == (1, 1, newest("recv", 12))
        for worker in workers:
            worker.say()
        for counts, words in [worker.wait("result") for worker in workers]:
            assert counts == {"0": (7, 7), "1": (1, 1)}
            assert words["0/0>1"].endswith("ranks 0,1), from rank 0 to rank 1")


def hook_calls(seat: Seat) -> dict[str, Any]:
    communicators = seat.join()
    seen: list[tuple[str, str, int]] = []
    communicators.before_call(lambda name, op, index: seen.append((name, op, index)))
    all_reduce_value(1.0)
    dist.barrier()
    communicators.before_call(None)
    all_reduce_value(1.0)

    def refuse(name: str, op: str, index: int) -> None:
        raise KeyError(op)

    communicators.before_call(refuse)
    try:
        dist.barrier()
        error = "none"
    except KeyError as raised:
        error = str(raised)
    seat.meet("end")
    return {"seen": seen, "error": error}


def test_a_hook_sees_each_collective_only_while_it_is_set() -> None:
    for result in run_all(hook_calls, 2):
        assert result["seen"] == [("0", "allreduce", 0), ("0", "barrier", 1)]
        assert result["error"] == "'barrier'"
