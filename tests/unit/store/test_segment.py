"""A segment: two banks whose header tells the truth at every instant."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from deadpool.core.types import Name
from deadpool.errors import LayoutMismatch, SnapshotError
from deadpool.store.segment import PAGE_BYTES, BankState, Segment, SegmentKind, SegmentLayout

LAYOUT = SegmentLayout(once_bytes=100, blob_capacity=5000, unique_bytes=10_000, replicated_bytes=7000)
FIRST, SECOND = Name(step=1, generation=0), Name(step=2, generation=0)


def test_areas_are_page_aligned_apart_and_of_their_size() -> None:
    segment = Segment.create("test", LAYOUT)
    areas = [segment.once_view()]
    for bank in (0, 1):
        areas += [segment.blob_view(bank), segment.unique_view(bank), segment.replicated_view(bank)]
    for number, area in enumerate(areas, start=1):
        area[:] = bytes([number]) * len(area)

    assert [len(area) for area in areas] == [100, 5000, 10_000, 7000, 5000, 10_000, 7000]
    with mmap.mmap(segment.fd, segment.size_bytes) as whole:
        starts = [whole.find(bytes([number]) * 100) for number in range(1, 8)]
        assert all(start % PAGE_BYTES == 0 for start in starts)
    assert all(bytes(area) == bytes([number]) * len(area) for number, area in enumerate(areas, start=1))
    assert (
        segment.size_bytes == LAYOUT.segment_bytes(SegmentKind.OWN) == PAGE_BYTES * (1 + 1 + 2 * (2 + 3 + 2))
    )
    del areas
    segment.close()


def test_a_holders_segment_has_no_replicated_area() -> None:
    segment = Segment.create("test", LAYOUT, kind=SegmentKind.HELD)

    assert segment.size_bytes == PAGE_BYTES * (1 + 1 + 2 * (2 + 3))
    with pytest.raises(LayoutMismatch):
        segment.replicated_view(0)
    segment.close()


def test_a_worker_maps_what_its_agent_made() -> None:
    made = Segment.create("test", LAYOUT)
    worker = Segment.attach(os.dup(made.fd))
    worker.begin(1, SECOND)
    worker.blob_view(1)[:4] = b"blob"
    worker.complete(1, blob_len=4)
    worker.write_once(b"record")

    info = made.bank_info(1)
    assert (info.state, info.name, info.blob_len) == (BankState.COMPLETE, SECOND, 4)
    assert made.bank_of(SECOND) == 1
    assert bytes(made.blob_view(1)[:4]) == b"blob"
    assert made.once_is_sealed
    assert bytes(made.once_view()[: made.once_len]) == b"record"
    worker.close()
    made.close()


def test_the_size_of_a_segment_can_never_change() -> None:
    segment = Segment.create("test", LAYOUT)
    for size_bytes in (PAGE_BYTES, segment.size_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size_bytes)
    segment.close()


def test_a_descriptor_that_is_no_segment_is_refused() -> None:
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 1 << 16)
    with pytest.raises(LayoutMismatch):
        Segment.attach(plain)
    os.close(plain)

    segment = Segment.create("test", LAYOUT)
    with mmap.mmap(segment.fd, PAGE_BYTES) as header:
        header[:8] = bytes(8)
    with pytest.raises(LayoutMismatch, match="no segment of this version"):
        Segment.attach(segment.fd)
    segment.close()


def test_a_bank_counts_only_between_complete_and_the_next_begin() -> None:
    segment = Segment.create("test", LAYOUT)
    assert segment.bank_info(0).state is BankState.EMPTY
    assert segment.bank_info(0).name is None

    segment.begin(0, FIRST)
    assert segment.bank_info(0).complete_name is None
    segment.complete(0, blob_len=0)
    assert segment.bank_info(0).complete_name == FIRST
    version = segment.bank_info(0).version
    segment.begin(0, SECOND)
    assert segment.bank_info(0).complete_name is None
    assert segment.bank_info(0).version > version
    segment.empty(0)
    assert segment.bank_info(0).state is BankState.EMPTY
    segment.close()


def test_completing_what_was_not_begun_is_an_error() -> None:
    segment = Segment.create("test", LAYOUT)
    with pytest.raises(SnapshotError):
        segment.complete(0, blob_len=0)
    segment.close()


def test_what_does_not_fit_is_refused() -> None:
    segment = Segment.create("test", LAYOUT)
    segment.begin(0, FIRST)
    with pytest.raises(LayoutMismatch):
        segment.complete(0, blob_len=5001)
    with pytest.raises(LayoutMismatch):
        segment.write_once(bytes(101))
    assert segment.bank_info(0).state is BankState.WRITING
    segment.close()


def test_a_checksum_belongs_to_what_the_bank_held_then() -> None:
    segment = Segment.create("test", LAYOUT)
    segment.begin(0, FIRST)
    segment.complete(0, blob_len=3, checksum=42)
    assert segment.bank_info(0).checksum == 42
    old_version = segment.bank_info(0).version

    segment.begin(0, SECOND)
    segment.complete(0, blob_len=3)
    assert segment.bank_info(0).checksum is None
    segment.set_checksum(0, old_version, 42)
    assert segment.bank_info(0).checksum is None
    assert segment.has_intact_bytes(0)
    segment.set_checksum(0, segment.bank_info(0).version, 42)
    assert not segment.has_intact_bytes(0)
    segment.close()


def test_a_write_once_area_counts_when_it_is_sealed() -> None:
    segment = Segment.create("test", LAYOUT)
    before = segment.once_is_sealed
    segment.write_once(b"record")
    assert (before, segment.once_is_sealed) == (False, True)
    segment.close()

    without = Segment.create(
        "test", SegmentLayout(once_bytes=0, blob_capacity=1, unique_bytes=1, replicated_bytes=0)
    )
    assert without.once_is_sealed
    without.close()


def test_closing_returns_descriptors_and_memory() -> None:
    def open_here() -> int:
        return sum("memfd:leak" in line for line in Path("/proc/self/maps").read_text().splitlines()) + sum(
            "memfd:leak" in os.readlink(entry.path)
            for entry in os.scandir("/proc/self/fd")
            if os.path.exists(entry.path)
        )

    for _ in range(5):
        segment = Segment.create("leak", LAYOUT)
        segment.unique_view(0)[:10] = bytes(10)
        slice_of_it = segment.unique_view(1)[5:10]
        assert open_here() > 0
        segment.close()
        slice_of_it.release()  # a view that somebody derived holds the mapping, and only that long
        segment.close()
    del segment
    assert open_here() == 0


def test_no_memory_is_a_clear_error() -> None:
    huge = SegmentLayout(once_bytes=0, blob_capacity=0, unique_bytes=1 << 60, replicated_bytes=0)
    with pytest.raises(SnapshotError, match=r"no memory for segment test of \d+ bytes"):
        Segment.create("test", huge, prefault=False)
