"""Every transport: small pushes pass bulk ones, and a dead generation frees the lanes."""

from __future__ import annotations

import os
import queue
import threading
import time

from deadpool.store.tcp import TcpTransport
from deadpool.store.transport import BULK_NICE
from tests.contract.transport.support import MIB, WAIT_S, Gate, Hosts, fill, layout, name, wait_until


def test_a_small_push_passes_a_bulk_one_that_is_stuck(hosts: Hosts) -> None:
    gate = Gate(ungated_ranks=(1,))
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    fill(owner.make_own(0, layout(24 * MIB)), 0, name(0))
    fill(owner.make_own(1, layout(1000)), 0, name(0))

    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    gate.await_stream()
    owner.replicator.push_captured(1, name(0), 0, "holder", None)

    assert owner.await_outcome().rank == 1
    gate.open()
    assert owner.await_outcome().rank == 0
    assert holder.held_names(0) == holder.held_names(1) == (name(0),)


def test_pushes_of_a_rank_go_in_order(hosts: Hosts) -> None:
    """Re-protection queues the rollback copy first, and a holder takes nothing before it."""
    owner, holder = hosts.add("owner"), hosts.add("holder")
    holder.server.set_generation(0, name(4))
    segment = owner.make_own(0, layout(MIB + 1))
    fill(segment, 0, name(4))
    fill(segment, 1, name(5), blob=b"b")

    owner.replicator.push_captured(0, name(4), 0, "holder", None)
    owner.replicator.push_captured(0, name(5), 1, "holder", name(4))

    assert [owner.await_held(), owner.await_held()] == [name(4), name(5)]


def test_a_push_never_overtakes_another_of_its_rank_in_the_other_lane(hosts: Hosts) -> None:
    gate = Gate(ungated_ranks=(0,))
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    holder.server.set_generation(0, name(4))
    fill(owner.make_own(1, layout(24 * MIB)), 0, name(4))
    segment = owner.make_own(0, layout(MIB - 100))
    fill(segment, 0, name(4), blob=bytes(2000))
    fill(segment, 1, name(5), blob=b"b")

    owner.replicator.push_captured(1, name(4), 0, "holder", None)
    gate.await_stream()
    owner.replicator.push_captured(0, name(4), 0, "holder", None)  # bulk: waits for the lane
    owner.replicator.push_captured(0, name(5), 1, "holder", name(4))  # small: could go at once
    gate.open()

    outcomes = [owner.await_outcome() for _ in range(3)]
    assert [(o.rank, o.name, o.failure) for o in outcomes] == [
        (1, name(4), None),
        (0, name(4), None),
        (0, name(5), None),
    ]


def test_a_copy_completed_after_the_generation_changed_is_not_reported(hosts: Hosts) -> None:
    gate = Gate()
    gate.is_at_commit = True
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    fill(owner.make_own(0, layout(1000)), 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    gate.await_stream()
    assert holder.held_names() == (name(0),)

    change = threading.Thread(target=owner.replicator.set_generation, args=(1,))
    change.start()
    wait_until(lambda: owner.replicator._generation == 1, "the new generation takes hold")
    gate.open()
    change.join()

    owner.replicator.close()
    assert owner.outcomes.empty()


def test_a_stop_that_comes_before_the_first_byte_counts(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    fill(owner.make_own(0, layout(1000)), 0, name(0))
    fill(owner.make_own(1, layout(1000)), 0, name(0))

    hosts.on_lookup = lambda: owner.replicator.stop(0, 0)
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    owner.replicator.push_captured(1, name(0), 0, "holder", None)

    assert owner.await_outcome().rank == 1  # the small lane has one thread: rank 0 is done with
    assert holder.held_names(0) == ()
    assert owner.replicator.metrics.as_dict()["streams_stopped"] == 1


def test_a_newer_generation_ends_a_push_without_a_word(hosts: Hosts) -> None:
    gate = Gate()
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    fill(owner.make_own(0, layout(24 * MIB)), 0, name(0))
    fill(owner.make_own(1, layout(24 * MIB)), 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    gate.await_stream()
    owner.replicator.push_captured(1, name(0), 0, "holder", None)

    change = threading.Thread(target=owner.replicator.set_generation, args=(1,))
    change.start()
    wait_until(lambda: all(lease.is_cancelled for lease in owner.store.leases), "the old push is given up")
    gate.open()
    change.join()

    assert owner.outcomes.empty()
    assert owner.replicator.metrics.as_dict()["streams_stopped"] == 2
    holder.server.set_generation(1, name(0))
    owner.replicator.push_captured(1, name(0), 0, "holder", None)
    assert owner.await_held() == name(0)
    assert owner.replicator.is_running


def test_bulk_is_sent_and_received_at_low_priority_and_small_is_not() -> None:
    """Over TCP only: in one process both sides are the lane's thread."""
    priorities: queue.Queue[tuple[str, int]] = queue.Queue()

    def note(side: str) -> None:
        priorities.put((side, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    gate = Gate(on_pass=lambda: note("receiver"))
    gate.is_armed = False
    hosts = Hosts(lambda: TcpTransport("token"), on_outcome=lambda: note("sender"))
    owner = hosts.add("owner")
    hosts.add("holder", gate=gate)
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        for unique_bytes, nice in ((100, normal), (MIB + 1, BULK_NICE)):
            rank = unique_bytes
            segment = owner.make_own(rank, layout(unique_bytes, once_bytes=0))
            fill(segment, 0, name(0))
            owner.replicator.push_captured(rank, name(0), 0, "holder", None)
            owner.await_held()
            assert set(priorities.queue) == {("receiver", nice), ("sender", nice)}
            priorities.queue.clear()
    finally:
        hosts.close()


def test_close_is_quick_while_a_stream_is_stuck(hosts: Hosts) -> None:
    gate = Gate()
    owner = hosts.add("owner")
    hosts.add("holder", gate=gate)
    fill(owner.make_own(0, layout(24 * MIB)), 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    gate.await_stream()

    start_s = time.monotonic()
    closing = threading.Thread(target=owner.replicator.close)
    closing.start()
    wait_until(lambda: all(lease.is_cancelled for lease in owner.store.leases), "the push is given up")
    gate.open()
    closing.join(WAIT_S)

    assert time.monotonic() - start_s < 3.0
    assert not owner.replicator.is_running
    assert owner.outcomes.empty()
