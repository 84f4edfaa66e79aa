"""The books of a host: copies, readers, writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool.core.types import Inventory, Name, RankCopies
from deadpool.errors import SnapshotError
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.segment import BankState, Segment, SegmentKind, SegmentLayout
from deadpool.store.transport import StreamStopped

LAYOUT = SegmentLayout(once_bytes=0, blob_capacity=100, unique_bytes=5000, replicated_bytes=100)


def name(step: int, generation: int = 0) -> Name:
    return Name(step=step, generation=generation)


def capture(segment: Segment, bank: int, of: Name) -> None:
    segment.begin(bank, of)
    segment.unique_view(bank)[:] = bytes([of.step]) * 5000
    segment.complete(bank, blob_len=10)


def receive(store: HostMemoryStore, rank: int, bank: int, of: Name) -> None:
    with store.condition:
        writer = store.write_held(rank, bank, of, generation=0, with_once=False)
    with writer:
        writer.segment.unique_view(bank)[:] = bytes([of.step]) * 5000
        writer.commit(blob_len=10, checksum=0)


@pytest.fixture
def store() -> Iterator[HostMemoryStore]:
    made = HostMemoryStore("h0-1", prefault=False)
    yield made
    made.close()


def test_the_inventory_lists_complete_copies_by_rank(store: HostMemoryStore) -> None:
    own = store.create_own(4, LAYOUT)
    capture(own, 0, name(3))
    own.begin(1, name(4))
    store.create_held(2, LAYOUT)
    receive(store, 2, 1, name(3))

    assert store.inventory(verify=False) == Inventory(
        member="h0-1",
        copies=(
            RankCopies(rank=2, held=(name(3),)),
            RankCopies(rank=4, own=(name(3),)),
        ),
    )


def test_a_copy_that_fails_its_checksum_is_emptied_and_not_listed(store: HostMemoryStore) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 0, name(3))
    capture(own, 1, name(4))
    for bank in (0, 1):
        with store.read(0, name(3 + bank), kind=SegmentKind.OWN) as reader:
            reader.finish(checksum=1 if bank == 0 else None)

    assert store.inventory().copies == (RankCopies(rank=0, own=(name(4),)),)
    assert own.bank_info(0).state is BankState.EMPTY


def test_copies_newer_than_the_rollback_name_are_emptied(store: HostMemoryStore) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 0, name(3, 0))
    capture(own, 1, name(4, 0))
    store.create_held(1, LAYOUT)
    receive(store, 1, 0, name(4, 1))
    store.held(1).begin(1, name(2))  # type: ignore[union-attr]

    store.empty_newer_than(name(3, 1))

    assert store.inventory(verify=False).copies == (RankCopies(rank=0, own=(name(3, 0),)), RankCopies(rank=1))
    assert [info.state for info in store.banks(1, SegmentKind.HELD)] == [BankState.EMPTY] * 2


def test_emptying_all_returns_the_memory(store: HostMemoryStore) -> None:
    store.create_own(0, LAYOUT)
    store.create_held(1, LAYOUT)
    assert store.memory_bytes() == LAYOUT.segment_bytes(SegmentKind.OWN) + LAYOUT.segment_bytes(
        SegmentKind.HELD
    )

    store.empty_held(1)
    assert store.memory_bytes() == LAYOUT.segment_bytes(SegmentKind.OWN)
    store.empty_all()
    assert store.memory_bytes() == 0
    assert store.own(0) is None
    assert store.banks(0, SegmentKind.OWN) == ()


def test_a_fresh_segment_takes_the_place_of_the_old_one(store: HostMemoryStore) -> None:
    first = store.create_own(0, LAYOUT)
    capture(first, 0, name(3))
    second = store.create_own(0, LAYOUT)

    assert store.own(0) is second
    assert first.fd == -1
    assert store.inventory().copies == (RankCopies(rank=0),)


def test_only_a_complete_copy_of_the_exact_name_can_be_read(store: HostMemoryStore) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 1, name(3))

    for wrong in (name(2), name(3, 1)):
        with pytest.raises(SnapshotError):
            store.read(0, wrong, kind=SegmentKind.OWN)
    for arguments in ({"kind": SegmentKind.HELD}, {"kind": SegmentKind.OWN, "bank": 0}):
        with pytest.raises(SnapshotError):
            store.read(0, name(3), **arguments)
    assert not store.leases


def test_a_reader_finds_out_that_its_bank_was_overwritten(store: HostMemoryStore) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 0, name(3))
    with store.read(0, name(3), kind=SegmentKind.OWN) as reader:
        capture(own, 0, name(3))  # the same name again: still other bytes
        with pytest.raises(StreamStopped):
            reader.finish()
    assert not store.leases


def test_stopping_waits_until_the_last_reader_lets_go(store: HostMemoryStore) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 0, name(3))
    capture(own, 1, name(4))
    reader = store.read(0, name(3), kind=SegmentKind.OWN)
    other = store.read(0, name(4), kind=SegmentKind.OWN)
    woken = threading.Event()
    reader.on_cancel(woken.set)

    def let_go_when_woken() -> None:
        assert woken.wait(10)
        with pytest.raises(StreamStopped):
            reader.check()
        with pytest.raises(StreamStopped):
            reader.finish()
        reader.close()

    thread = threading.Thread(target=let_go_when_woken)
    thread.start()
    assert store.stop_streams_reading(0, 0) is True
    assert store.leases == {other}
    other.check()
    thread.join()
    assert store.stop_streams_reading(0, 0) is False
    other.close()


def test_a_thread_that_holds_on_costs_a_bounded_wait_and_can_finish_nothing(
    store: HostMemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 0, name(3))
    reader = store.read(0, name(3), kind=SegmentKind.OWN)
    assert store.stop_streams_reading(0, 0, timeout_s=0.05) is True
    assert "did not let go" in caplog.text
    with pytest.raises(StreamStopped):
        reader.finish()
    reader.close()


def test_a_reader_that_is_done_is_not_waited_for(store: HostMemoryStore) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 0, name(3))
    reader = store.read(0, name(3), kind=SegmentKind.OWN)
    reader.finish(checksum=5)
    assert store.stop_streams_reading(0, 0) is False
    reader.check()
    assert own.bank_info(0).checksum == 5
    reader.close()


def test_a_hook_set_after_the_stop_is_called_at_once(store: HostMemoryStore) -> None:
    own = store.create_own(0, LAYOUT)
    capture(own, 0, name(3))
    reader = store.read(0, name(3), kind=SegmentKind.OWN)
    reader.cancel()
    called: list[bool] = []
    reader.on_cancel(lambda: called.append(True))
    assert called == [True]
    reader.close()


def test_a_bank_that_is_written_and_not_committed_is_empty(store: HostMemoryStore) -> None:
    held = store.create_held(0, LAYOUT)
    with store.condition:
        writer = store.write_held(0, 1, name(3), generation=0, with_once=False)
    assert held.bank_info(1).state is BankState.WRITING
    assert store.is_used(0, 1, SegmentKind.HELD)
    writer.close()
    assert held.bank_info(1).state is BankState.EMPTY
    assert not store.is_used(0, 1, SegmentKind.HELD)


def test_a_writer_that_was_stopped_cannot_commit(store: HostMemoryStore) -> None:
    held = store.create_held(0, LAYOUT)
    with store.condition:
        writer = store.write_held(0, 1, name(3), generation=4, with_once=False)
    assert store.stop_writers(lambda _, generation: generation < 4, timeout_s=0.05) is False
    assert store.stop_writers(lambda _, generation: generation < 5, timeout_s=0.05) is True
    with pytest.raises(StreamStopped):
        writer.commit(blob_len=1, checksum=1)
    writer.close()
    assert held.bank_info(1).state is BankState.EMPTY
    assert store.stop_writers(lambda *_: True) is False


def test_held_memory_stays_within_the_accept_limit() -> None:
    one = LAYOUT.segment_bytes(SegmentKind.HELD)
    store = HostMemoryStore("h", accept_limit_bytes=2 * one, prefault=False)
    store.create_own(9, LAYOUT)  # does not count
    store.create_held(0, LAYOUT)
    store.create_held(1, LAYOUT)
    store.create_held(1, LAYOUT)  # replaces its own
    with pytest.raises(SnapshotError, match=f"needs {one} bytes here, 0 are left"):
        store.create_held(2, LAYOUT)
    store.empty_held(0)
    store.create_held(2, LAYOUT)
    store.close()


def test_held_memory_stays_within_what_the_host_has(store: HostMemoryStore) -> None:
    huge = SegmentLayout(once_bytes=0, blob_capacity=0, unique_bytes=1 << 46, replicated_bytes=0)
    with pytest.raises(SnapshotError, match="are left"):
        store.create_held(0, huge)


def test_a_reserved_segment_becomes_that_of_the_rank_that_needs_one_like_it(store: HostMemoryStore) -> None:
    store.reserve(LAYOUT)
    reserved_bytes = store.memory_bytes()

    own = store.create_own(7, LAYOUT)
    capture(own, 0, name(3))

    assert store.memory_bytes() == reserved_bytes == own.size_bytes, "no other memory was taken"
    assert store.inventory(verify=False).copies == (RankCopies(rank=7, own=(name(3),)),)


def test_a_reserved_segment_of_another_size_makes_room_for_the_one_that_is_needed(
    store: HostMemoryStore,
) -> None:
    store.reserve(LAYOUT)
    larger = SegmentLayout(once_bytes=0, blob_capacity=100, unique_bytes=9000, replicated_bytes=100)

    own = store.create_own(0, larger)

    assert own.layout == larger
    assert store.memory_bytes() == own.size_bytes


def test_a_rank_waits_for_the_segment_that_is_being_reserved() -> None:
    large = SegmentLayout(once_bytes=0, blob_capacity=100, unique_bytes=100 << 20, replicated_bytes=0)
    store = HostMemoryStore("h0-1")
    spare = threading.Thread(target=store.reserve, args=(large,))
    spare.start()
    while spare.is_alive() and "deadpool-reserved" not in Path("/proc/self/maps").read_text():
        threading.Event().wait(0.001)  # its pages are being touched as soon as it is mapped

    own = store.create_own(0, large)
    spare.join(30)

    assert store.memory_bytes() == own.size_bytes, "the reserved one was taken, not another one made"
    store.close()


def test_what_is_reserved_goes_when_the_host_starts_anew(store: HostMemoryStore) -> None:
    store.reserve(LAYOUT)
    store.empty_all()
    assert store.memory_bytes() == 0
