"""When a collective has waited for long, and what the page says of it."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool.liveness.progress import ENTRIES_OFFSET, ENTRY_BYTES, PAGE_BYTES, Field, WorkerPage
from deadpool.liveness.waiting import OPERATIONS, CollectiveWatch, decode_call, hash_name

SOURCES = Path(__file__).parents[3] / "deadpool" / "communicator" / "csrc"
REPORT_S = 10.0


class Rig:
    """Rank 0, its page, and what the native part would write into it."""

    def __init__(self, page: WorkerPage) -> None:
        self.page = page
        self.watch = CollectiveWatch(REPORT_S)
        self.watch.add(0, page)
        self._map = mmap.mmap(page.fd, PAGE_BYTES)
        self._count = 0

    def call(self, name: str, issued: int, completed: int, word: int = 0, place: int = 0) -> None:
        offset = ENTRIES_OFFSET + ENTRY_BYTES * place
        struct.pack_into("<4Q", self._map, offset, hash_name(name), issued, completed, word)
        self._count = max(self._count, place + 1)
        struct.pack_into("<Q", self._map, Field.HANDLE_COUNT.value, self._count)

    def close(self) -> None:
        self._map.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    page = WorkerPage.create("test-page")
    rig = Rig(page)
    yield rig
    rig.close()
    page.close()


def test_a_collective_that_waits_is_told_once_and_not_before_the_limit(rig: Rig) -> None:
    rig.call("data", issued=3, completed=2)
    assert [rig.watch.check(second) for second in (0.0, 9.9, 10.0, 10.3, 60.0)] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_the_next_collective_is_timed_anew(rig: Rig) -> None:
    rig.call("data", issued=3, completed=2)
    assert not rig.watch.check(0.0)
    rig.call("data", issued=4, completed=3)
    assert not rig.watch.check(9.0)
    assert not rig.watch.check(18.9)
    assert rig.watch.check(19.0)


def test_a_second_group_that_waits_for_long_is_told_too(rig: Rig) -> None:
    rig.call("data", issued=1, completed=0)
    rig.watch.check(0.0)
    assert rig.watch.check(10.0)
    rig.call("tensor", issued=1, completed=0, place=1)
    assert not rig.watch.check(12.0)
    assert rig.watch.check(22.0)


def test_nothing_is_told_of_completed_collectives_quiet_sections_and_ranks_taken_off(rig: Rig) -> None:
    rig.call("data", issued=3, completed=3)
    assert not rig.watch.check(0.0)
    assert not rig.watch.check(100.0)
    rig.call("data", issued=4, completed=3)
    rig.page.set_quiet(True)
    rig.watch.check(100.0)
    assert not rig.watch.check(200.0)
    rig.page.set_quiet(False)
    rig.watch.remove(0)
    assert not rig.watch.check(300.0)


def test_operation_and_bytes_of_the_newest_call_are_on_the_page(rig: Rig) -> None:
    rig.call("data", issued=1, completed=0, word=(hash_name("reduce_scatter") & 0xFFFF) << 48 | 4096)
    ((_, _, _, word),) = rig.page.sample().handles
    assert decode_call(word) == ("reduce_scatter", 4096)
    assert decode_call(0) == ("unknown", 0)


def test_every_operation_of_the_native_part_is_known_and_tells_apart() -> None:
    source = (SOURCES / "backend.cpp").read_text(encoding="utf-8")
    native = set(re.findall(r'(?:dispatch|track)\("(\w+)"', source))
    assert len(native) > 15
    assert native <= set(OPERATIONS)
    assert len({hash_name(name) & 0xFFFF for name in OPERATIONS}) == len(OPERATIONS)
