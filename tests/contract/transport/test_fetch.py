"""Every transport: a fetch brings the exact copy that was asked for, or fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from deadpool.errors import LayoutMismatch, SnapshotError
from deadpool.store.fetch import fetch_once, fetch_replicated, fetch_unique
from deadpool.store.segment import BankState, Segment, SegmentKind, SegmentLayout
from deadpool.store.transport import FetchRequest, Part, PeerRefused, TransportFailed
from tests.contract.transport.support import MIB, WAIT_S, Gate, Host, Hosts, fill, layout, name, wait_until


def make_joining(hosts: Hosts, sizes: SegmentLayout) -> tuple[Host, Segment]:
    joining = hosts.add("joining")
    segment = joining.store.create_own(0, sizes)
    segment.begin(0, name(5))
    return joining, segment


def test_a_joining_host_gets_a_rank_from_holder_and_peers(hosts: Hosts) -> None:
    owner, holder, peer = hosts.add("owner"), hosts.add("holder"), hosts.add("peer")
    sizes = layout(2 * MIB + 5, replicated_bytes=MIB + 7)
    lost = owner.make_own(0, sizes, once=b"constructor record")
    fill(lost, 0, name(5), blob=b"the blob", pattern=3)
    holder.server.set_generation(0, name(5))
    owner.replicator.push_captured(0, name(5), 0, "holder", None)
    assert owner.await_held() == name(5)
    twin = peer.make_own(1, sizes)
    fill(twin, 1, name(5), pattern=3)
    joining = hosts.add("joining")

    once, found = fetch_once(joining.transport, holder.address, 0, generation=0)
    segment = joining.store.create_own(0, found)
    segment.write_once(once)
    segment.begin(0, name(5))
    blob_len = fetch_unique(joining.transport, holder.address, 0, name(5), generation=0, into=segment, bank=0)
    half = MIB // 2
    for start, end in ((0, half), (half, sizes.replicated_bytes)):
        fetch_replicated(
            joining.transport,
            peer.address,
            1,
            name(5),
            generation=0,
            offset_bytes=start,
            into=segment.replicated_view(0)[start:end],
        )
    segment.complete(0, blob_len=blob_len)

    assert (once, found) == (b"constructor record", sizes)
    assert bytes(segment.blob_view(0)[:blob_len]) == b"the blob"
    assert segment.unique_view(0) == lost.unique_view(0)
    assert segment.replicated_view(0) == lost.replicated_view(0)
    (copies,) = joining.store.inventory().copies
    assert copies.own == (name(5),)


def test_the_owner_itself_serves_its_copy(hosts: Hosts) -> None:
    owner = hosts.add("owner")
    sizes = layout(MIB)
    source = owner.make_own(0, sizes)
    fill(source, 1, name(5))
    joining, segment = make_joining(hosts, sizes)

    fetch_unique(joining.transport, owner.address, 0, name(5), generation=0, into=segment, bank=0)

    assert segment.unique_view(0) == source.unique_view(1)
    assert owner.server.metrics.as_dict()["fetch_bytes_sent"] == MIB + 4


@pytest.mark.parametrize("step,generation", [(4, 0), (5, 1), (6, 0)])
def test_a_copy_of_another_name_is_not_served(hosts: Hosts, step: int, generation: int) -> None:
    owner = hosts.add("owner")
    fill(owner.make_own(0, layout(1000)), 0, name(5))
    joining, segment = make_joining(hosts, layout(1000))

    with pytest.raises(PeerRefused, match="no complete copy"):
        fetch_unique(
            joining.transport,
            owner.address,
            0,
            name(step, generation),
            generation=0,
            into=segment,
            bank=0,
        )


def test_a_bank_in_writing_is_not_served(hosts: Hosts) -> None:
    owner = hosts.add("owner")
    source = owner.make_own(0, layout(1000))
    source.begin(0, name(5))
    joining, segment = make_joining(hosts, layout(1000))

    with pytest.raises(PeerRefused):
        fetch_unique(joining.transport, owner.address, 0, name(5), generation=0, into=segment, bank=0)


def test_a_copy_without_its_write_once_area_is_not_served(hosts: Hosts) -> None:
    owner = hosts.add("owner")
    source = owner.store.create_own(0, layout(1000))
    fill(source, 0, name(5))
    joining, segment = make_joining(hosts, layout(1000))

    with pytest.raises(PeerRefused, match="write-once area"):
        fetch_unique(joining.transport, owner.address, 0, name(5), generation=0, into=segment, bank=0)
    with pytest.raises(PeerRefused, match="write-once area"):
        fetch_once(joining.transport, owner.address, 0, generation=0)


def test_a_fetch_of_an_older_generation_is_refused(hosts: Hosts) -> None:
    owner = hosts.add("owner")
    fill(owner.make_own(0, layout(1000)), 0, name(5))
    owner.server.set_generation(2)
    joining = hosts.add("joining")

    with pytest.raises(PeerRefused, match="generation 1 is over"):
        fetch_once(joining.transport, owner.address, 0, generation=1)


def test_another_layout_is_refused_before_a_byte_is_placed(hosts: Hosts) -> None:
    owner = hosts.add("owner")
    fill(owner.make_own(0, layout(1000)), 0, name(5))
    joining, segment = make_joining(hosts, layout(2000))

    with pytest.raises(LayoutMismatch):
        fetch_unique(joining.transport, owner.address, 0, name(5), generation=0, into=segment, bank=0)


@pytest.mark.parametrize("offset_bytes,length_bytes", [(4000, 1001), (5001, None), (1 << 62, 10)])
def test_a_range_outside_the_replicated_area_is_refused(
    hosts: Hosts, offset_bytes: int, length_bytes: int | None
) -> None:
    owner = hosts.add("owner")
    fill(owner.make_own(0, layout(1000, replicated_bytes=5000)), 0, name(5))
    joining = hosts.add("joining")
    request = FetchRequest(
        rank=0,
        part=Part.REPLICATED,
        generation=0,
        name=name(5),
        offset_bytes=offset_bytes,
        length_bytes=length_bytes,
    )

    with pytest.raises(SnapshotError):
        joining.transport.fetch(
            owner.address,
            request,
            lambda info: [memoryview(bytearray(n)) for _, n in info.areas],
            timeout_s=5.0,
        )


def test_a_holder_has_no_replicated_area_to_serve(hosts: Hosts) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    fill(owner.make_own(0, layout(1000)), 0, name(0))
    owner.replicator.push_captured(0, name(0), 0, "holder", None)
    owner.await_held()

    with pytest.raises(PeerRefused):
        fetch_replicated(
            owner.transport,
            holder.address,
            0,
            name(0),
            generation=0,
            offset_bytes=0,
            into=memoryview(bytearray(9)),
        )


def test_only_the_write_once_area_goes_without_a_name(hosts: Hosts) -> None:
    owner = hosts.add("owner")
    fill(owner.make_own(0, layout(1000)), 0, name(5))
    joining = hosts.add("joining")
    request = FetchRequest(rank=0, part=Part.UNIQUE, generation=0)

    with pytest.raises(PeerRefused, match="without a name"):
        joining.transport.fetch(owner.address, request, lambda _: [], timeout_s=5.0)


def test_a_fetch_from_a_bank_that_is_overwritten_meanwhile_fails(hosts: Hosts) -> None:
    gate = Gate()
    owner = hosts.add("owner", gate=gate)
    sizes = layout(24 * MIB)
    source = owner.make_own(0, sizes)
    fill(source, 0, name(5))
    joining, segment = make_joining(hosts, sizes)

    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(
            fetch_unique, joining.transport, owner.address, 0, name(5), generation=0, into=segment, bank=0
        )
        gate.await_stream()
        fill(source, 0, name(6))
        gate.open()
        with pytest.raises(SnapshotError):
            fetched.result(timeout=WAIT_S)

    assert segment.bank_info(0).state is BankState.WRITING


def test_stopping_the_readers_of_a_bank_breaks_a_fetch(hosts: Hosts) -> None:
    gate = Gate()
    owner = hosts.add("owner", gate=gate)
    sizes = layout(24 * MIB)
    fill(owner.make_own(0, sizes), 0, name(5))
    joining, segment = make_joining(hosts, sizes)

    with ThreadPoolExecutor(2) as pool:
        fetched = pool.submit(
            fetch_unique, joining.transport, owner.address, 0, name(5), generation=0, into=segment, bank=0
        )
        gate.await_stream()
        stopped = pool.submit(owner.replicator.stop, 0, 0)
        wait_until(lambda: all(lease.is_cancelled for lease in owner.store.leases), "the stop takes hold")
        gate.open()
        assert stopped.result(timeout=WAIT_S) is True
        assert not owner.store.leases
        with pytest.raises(TransportFailed):
            fetched.result(timeout=WAIT_S)


def test_fetches_beside_a_careless_writer_are_whole_or_fail(hosts: Hosts) -> None:
    """Many chances for mixed bytes: every fetch that succeeds has the bytes of its name alone."""
    owner = hosts.add("owner")
    sizes = layout(3 * MIB, replicated_bytes=100)
    source = owner.make_own(0, sizes)
    joining, segment = make_joining(hosts, sizes)
    fill(source, 0, name(5))

    def overwrite() -> None:
        for step in (6, 5):
            source.begin(0, name(step))
            source.unique_view(0)[:] = bytes([step]) * sizes.unique_bytes
            source.complete(0, blob_len=4)

    with ThreadPoolExecutor(1) as pool:
        for attempt in range(60):
            overwriting = pool.submit(overwrite)
            if attempt % 3 == 0:
                overwriting.result(timeout=WAIT_S)  # this fetch finds a quiet bank
            try:
                fetch_unique(joining.transport, owner.address, 0, name(5), generation=0, into=segment, bank=0)
            except SnapshotError:
                assert attempt % 3 != 0
            else:
                assert bytes(segment.unique_view(0)) == bytes([5]) * sizes.unique_bytes
            overwriting.result(timeout=WAIT_S)


def test_nobody_to_fetch_from_is_a_failure(hosts: Hosts) -> None:
    owner, joining = hosts.add("owner"), hosts.add("joining")
    owner.transport.close()

    with pytest.raises(TransportFailed):
        fetch_once(joining.transport, owner.address, 0, generation=0)


def test_a_stream_over_a_bank_that_is_being_fetched_breaks_the_fetch(hosts: Hosts) -> None:
    gate = Gate()
    gate.is_armed = False
    owner, holder = hosts.add("owner"), hosts.add("holder", gate=gate)
    sizes = layout(24 * MIB)
    source = owner.make_own(0, sizes)
    for bank, of, keep in ((0, name(0), None), (1, name(1), name(0))):
        fill(source, bank, of)
        owner.replicator.push_captured(0, of, bank, "holder", keep)
        owner.await_held()
    joining, segment = make_joining(hosts, sizes)
    gate.is_armed = True

    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(
            fetch_unique, joining.transport, holder.address, 0, name(0), generation=0, into=segment, bank=0
        )
        gate.await_stream()
        fill(source, 0, name(2))
        owner.replicator.push_captured(0, name(2), 0, "holder", name(1))
        wait_until(
            lambda: any(lease.is_cancelled for lease in holder.store.leases), "the stream wants the bank"
        )
        gate.open()
        with pytest.raises(TransportFailed):
            fetched.result(timeout=WAIT_S)

    assert owner.await_held() == name(2)
    names = {info.complete_name for info in holder.store.banks(0, SegmentKind.HELD)}
    assert names == {name(1), name(2)}
