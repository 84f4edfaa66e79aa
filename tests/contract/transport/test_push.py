"""Every transport: a copy arrives whole, or it does not count."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from deadpool.core.types import Name
from deadpool.store.checksum import RunningChecksum
from deadpool.store.segment import BankState, Segment, SegmentKind
from deadpool.store.transport import (
    Address,
    Area,
    Lane,
    PeerRefused,
    StreamHeader,
    StreamStopped,
    Transport,
    TransportFailed,
    Views,
)
from tests.contract.transport.support import MIB, Gate, Host, Hosts, fill, layout, name, wait_until


class BankSource:
    """Sends a bank without the replicator."""

    def __init__(self, segment: Segment, bank: int) -> None:
        self.areas: Views = [
            (Area.ONCE, segment.once_view()[: segment.once_len]),
            (Area.BLOB, segment.blob_view(bank)[: segment.bank_info(bank).blob_len]),
            (Area.UNIQUE, segment.unique_view(bank)),
        ]
        self.running = RunningChecksum()
        self.n_sent = 0

    def check(self) -> None: ...

    def on_cancel(self, hook: object) -> None: ...

    def sent(self, n_bytes: int) -> None:
        self.n_sent += n_bytes

    def chunk_sent(self, area: Area, digest: int) -> None:
        if area is not Area.ONCE:
            self.running.add(digest)

    def finish(self) -> int:
        return self.running.value()


def header_of(segment: Segment, bank: int, *, generation: int = 0, keep: Name | None = None) -> StreamHeader:
    info = segment.bank_info(bank)
    assert info.name is not None
    return StreamHeader(
        rank=0,
        name=info.name,
        generation=generation,
        keep=keep,
        layout=segment.layout,
        blob_len=info.blob_len,
        once_len=segment.once_len,
        once_checksum=segment.once_checksum,
    )


def push(transport: Transport, address: Address, header: StreamHeader, source: BankSource) -> None:
    transport.push(address, header, source, lane=Lane.SMALL, timeout_s=5.0)


def protect(owner: Host, segment: Segment, *, rank: int = 0) -> None:
    """Have snapshot 0 and step 1 held, so that the holder has two complete copies."""
    for bank, of, keep in ((0, name(0), None), (1, name(1), name(0))):
        fill(segment, bank, of)
        owner.replicator.push_captured(rank, of, bank, "holder", keep)
        assert owner.await_held() == of


@pytest.mark.parametrize("unique_bytes", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 12345])
def test_every_byte_that_travels_arrives(hosts: Hosts, unique_bytes: int) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(unique_bytes), once=b"constructor record")
    fill(segment, 0, name(0), blob=b"small blob")

    owner.replicator.push_captured(0, name(0), 0, "holder", None)

    assert owner.await_held() == name(0)
    held = holder.store.held(0)
    assert held is not None
    assert bytes(held.once_view()[: held.once_len]) == b"constructor record"
    bank = held.bank_of(name(0))
    assert bank is not None
    assert bytes(held.blob_view(bank)[: held.bank_info(bank).blob_len]) == b"small blob"
    assert held.unique_view(bank) == segment.unique_view(0)
    assert holder.held_names() == (name(0),)
    assert owner.replicator.metrics.as_dict()["bytes_sent"] == 18 + 10 + unique_bytes
    assert holder.server.metrics.as_dict()["bytes_received"] == 18 + 10 + unique_bytes
    assert segment.bank_info(0).sent_bytes == 18 + 10 + unique_bytes


def test_owner_and_holder_keep_the_same_checksum(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(2 * MIB))
    protect(owner, segment)

    (held,) = [info for info in holder.store.banks(0, SegmentKind.HELD) if info.name == name(1)]
    assert held.checksum is not None
    assert held.checksum == segment.bank_info(1).checksum
    assert segment.has_intact_bytes(1)


def test_the_write_once_area_travels_once(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000), once=bytes(2500))
    protect(owner, segment)

    assert holder.server.metrics.as_dict()["bytes_received"] == 2500 + 2 * (4 + 1000)


def test_a_copy_that_is_held_already_is_answered_without_sending_it(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    protect(owner, segment)
    before = holder.server.metrics.as_dict()["bytes_received"]

    owner.replicator.push_captured(0, name(1), 1, "holder", name(0))

    assert owner.await_held() == name(1)
    assert holder.server.metrics.as_dict()["bytes_received"] == before


def test_a_new_copy_goes_over_the_one_that_is_not_kept(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    protect(owner, segment)
    fill(segment, 0, name(2))

    owner.replicator.push_captured(0, name(2), 0, "holder", name(1))

    assert owner.await_held() == name(2)
    assert set(holder.held_names()) == {name(1), name(2)}


def test_a_chunk_damaged_under_way_is_refused(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(3 * MIB))
    protect(owner, segment)
    fill(segment, 0, name(2))

    class Damaging(BankSource):
        """Changes a byte after the digest of its chunk was taken."""

        def check(self) -> None:
            if self.n_sent > MIB:
                segment.unique_view(0)[2 * MIB] ^= 1

    with pytest.raises(TransportFailed):
        push(owner.transport, holder.address, header_of(segment, 0, keep=name(1)), Damaging(segment, 0))

    wait_until(lambda: not holder.store.leases, "the holder lets go of the bank")
    assert holder.held_names() == (name(1),)
    assert holder.server.metrics.as_dict()["streams_failed"] == 1


def test_a_wrong_total_checksum_is_refused(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))
    source = BankSource(segment, 0)
    source.running.add(1)

    with pytest.raises(TransportFailed):
        push(owner.transport, holder.address, header_of(segment, 0), source)

    wait_until(lambda: not holder.store.leases, "the holder lets go of the bank")
    assert holder.held_names() == ()


def test_a_copy_whose_write_once_area_is_damaged_does_not_count(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))
    header = header_of(segment, 0)
    segment.once_view()[0] ^= 1
    source = BankSource(segment, 0)

    with pytest.raises(TransportFailed):
        push(owner.transport, holder.address, header, source)

    wait_until(lambda: not holder.store.leases, "the holder lets go of the bank")
    held = holder.store.held(0)
    assert held is not None
    assert not held.once_is_sealed
    assert holder.held_names() == ()


def test_a_stream_stopped_in_the_middle_never_counts(hosts: Hosts) -> None:
    gate = Gate()
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    segment = owner.make_own(0, layout(24 * MIB))
    fill(segment, 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    gate.await_stream()

    stopper = threading.Thread(target=owner.replicator.stop, args=(0, 0))
    stopper.start()
    wait_until(lambda: all(lease.is_cancelled for lease in owner.store.leases), "the stop takes hold")
    gate.open()
    stopper.join()

    assert not owner.store.leases
    segment.begin(0, name(1))  # what the worker does next
    wait_until(lambda: not holder.store.leases, "the holder lets go of the bank")
    assert holder.held_names() == ()
    wait_until(
        lambda: owner.replicator.metrics.as_dict()["streams_stopped"] == 1, "the lane gives up the push"
    )
    assert owner.outcomes.empty()


def test_the_bank_can_be_pushed_again_after_a_stop(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))
    assert owner.replicator.stop(0, 0) is False

    owner.replicator.push_captured(0, name(0), 0, "holder", None)

    assert owner.await_held() == name(0)
    assert holder.held_names() == (name(0),)


def test_a_stream_of_an_older_generation_is_refused(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))
    holder.server.set_generation(2, name(0))

    with pytest.raises(PeerRefused, match="generation 1 is over, this host acked 2"):
        push(owner.transport, holder.address, header_of(segment, 0, generation=1), BankSource(segment, 0))

    assert holder.held_names() == ()


def test_a_stream_under_way_is_broken_before_a_newer_generation_is_acked(hosts: Hosts) -> None:
    gate = Gate()
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    segment = owner.make_own(0, layout(24 * MIB))
    fill(segment, 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    gate.await_stream()

    fence = threading.Thread(target=holder.server.set_generation, args=(1, name(0)))
    fence.start()
    wait_until(lambda: all(lease.is_cancelled for lease in holder.store.leases), "the fence takes hold")
    gate.open()
    fence.join()

    assert not holder.store.leases
    assert [info.state for info in holder.store.banks(0, SegmentKind.HELD)] == [BankState.EMPTY] * 2
    assert "generation 0 is over" in owner.await_failure()


def test_a_holder_never_overwrites_its_only_complete_copy(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder", choose_bank=lambda *_: 0)
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    assert owner.await_held() == name(0)
    fill(segment, 1, name(1))

    owner.replicator.push_captured(0, name(1), 1, "holder", name(0))

    assert "the only complete copy" in owner.await_failure()
    assert holder.held_names() == (name(0),)


def test_a_full_holder_refuses_and_says_so(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder", accept_limit_bytes=MIB)
    segment = owner.make_own(0, layout(2 * MIB))
    fill(segment, 0, name(0))

    owner.replicator.push_captured(0, name(0), 0, "holder", None)

    assert "holder is full" in owner.await_failure()
    assert holder.store.memory_bytes() == 0


def test_sizes_that_make_no_sense_take_no_memory(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))
    header = header_of(segment, 0)
    huge = layout(1 << 47)

    for wrong in (
        replace(header, layout=huge),
        replace(header, blob_len=5000),
        replace(header, once_len=1 << 40),
        replace(header, rank=1 << 31),
    ):
        with pytest.raises(PeerRefused):
            push(owner.transport, holder.address, wrong, BankSource(segment, 0))
    assert holder.store.memory_bytes() == 0


def test_copies_of_another_layout_are_not_thrown_away(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    protect(owner, owner.make_own(0, layout(1000)))
    other = owner.make_own(0, layout(2000))
    fill(other, 0, name(2))

    owner.replicator.push_captured(0, name(2), 0, "holder", name(1))

    assert "another layout" in owner.await_failure()
    assert set(holder.held_names()) == {name(0), name(1)}


def test_another_write_once_area_is_refused_while_copies_are_held(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    protect(owner, owner.make_own(0, layout(1000), once=b"one"))
    other = owner.make_own(0, layout(1000), once=b"two")
    fill(other, 0, name(2))

    owner.replicator.push_captured(0, name(2), 0, "holder", name(1))
    assert "another write-once area" in owner.await_failure()

    holder.store.empty_held(0)
    holder.server.set_generation(0, name(2))
    owner.replicator.push_captured(0, name(2), 0, "holder", None)
    assert owner.await_held() == name(2)


def test_nobody_at_the_address_is_a_failure(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))
    holder.transport.close()

    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    assert owner.await_failure()

    owner.replicator.push_captured(0, name(0), 0, "stranger", None)
    assert "no address of member stranger" in owner.await_failure()


def test_a_bank_that_moved_on_is_not_sent(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(1))

    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    assert "no complete copy" in owner.await_failure()
    owner.replicator.push_captured(7, name(0), 0, "holder", None)
    assert "no complete copy" in owner.await_failure()
    assert holder.store.memory_bytes() == 0


def test_bytes_overwritten_while_they_are_sent_never_count(hosts: Hosts) -> None:
    """A worker that overwrites without a stop: the digests or the bank's version find it."""
    gate = Gate()
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    segment = owner.make_own(0, layout(24 * MIB))
    fill(segment, 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    gate.await_stream()

    fill(segment, 0, name(1))
    gate.open()

    assert owner.await_failure()
    assert holder.held_names() == ()


def test_a_stop_raises_at_the_sender(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))

    class Stopped(BankSource):
        def check(self) -> None:
            raise StreamStopped("by the test")

    with pytest.raises(StreamStopped):
        push(owner.transport, holder.address, header_of(segment, 0), Stopped(segment, 0))
    assert holder.held_names() == ()


def test_a_deadline_that_has_passed_is_a_failure(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner", timeout_s=lambda _: 0.0), hosts.add("holder")
    segment = owner.make_own(0, layout(1000))
    fill(segment, 0, name(0))

    owner.replicator.push_captured(0, name(0), 0, "holder", None)

    assert "not done within 0.0 s" in owner.await_failure()
    assert holder.held_names() == ()
