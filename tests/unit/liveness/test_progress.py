from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deadpool.config import LivenessConfig
from deadpool.liveness.progress import (
    ENTRIES_OFFSET,
    MAX_ENTRIES,
    PAGE_BYTES,
    PAGE_MAGIC,
    ProgressChange,
    ProgressWatch,
    WorkerPage,
)

CONFIG = LivenessConfig(
    progress_timeout_s=10.0, first_step_timeout_s=60.0, silence_dead_s=3.0, silence_suspect_s=1.0
)
POLL_S = 0.25


@pytest.fixture
def page() -> Iterator[WorkerPage]:
    page = WorkerPage.create("test-page")
    yield page
    page.close()


class Native:
    """Writes what the C++ side writes, through a mapping of its own."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)

    def put(self, offset: int, *values: int) -> None:
        struct.pack_into(f"<{len(values)}Q", self._map, offset, *values)

    def get(self, offset: int) -> int:
        (value,) = struct.unpack_from("<Q", self._map, offset)
        return int(value)

    def tick(self) -> None:
        self.put(8, self.get(8) + 1)

    def close(self) -> None:
        self._map.close()


class Rig:
    """One watched worker that runs, with a clock moved by hand."""

    def __init__(self, page: WorkerPage) -> None:
        self.native = Native(page.fd)
        self.native.tick()
        self.page = page
        page.finish_step(0, 1, 50_000_000)  # past its first step
        self.now_s = 500.0
        self.watch = ProgressWatch(CONFIG)
        self.watch.add(3, page, self.now_s)
        assert self.watch.check(self.now_s) == []
        self.step = 0

    def run(
        self, seconds: float, *, ticks: bool = True, steps: bool = False
    ) -> list[tuple[ProgressChange, float]]:
        found = []
        for _ in range(round(seconds / POLL_S)):
            self.now_s += POLL_S
            if ticks:
                self.native.tick()
            if steps:
                self.step += 1
                self.page.finish_step(self.step, 1, 50_000_000)
            found += [(verdict.change, verdict.age_s) for verdict in self.watch.check(self.now_s)]
        return found


@pytest.fixture
def rig(page: WorkerPage) -> Iterator[Rig]:
    rig = Rig(page)
    yield rig
    rig.native.close()


def test_fields_lie_where_the_native_side_expects_them(page: WorkerPage) -> None:
    native = Native(page.fd)
    page.begin_optimizer(8)
    page.finish_step(8, 2, 40_000_000)
    page.set_quiet(True)
    assert [native.get(offset) for offset in (0, 24, 32, 40, 64, 80)] == [
        PAGE_MAGIC, 8, 2, 8, 1, 40_000_000
    ]  # fmt: skip
    assert native.get(48) > 0
    native.put(8, 17)
    native.put(16, 5)
    native.put(72, 2)
    native.put(ENTRIES_OFFSET, 0xFFFFFFFFFFFFFFFF, 9, 8, 4096, 12, 3, 3, 64)
    sample = page.sample()
    assert (sample.tick, sample.closed_generation, sample.began_step) == (17, 5, 8)
    assert (sample.finished_step, sample.finished_generation, sample.is_quiet) == (8, 2, True)
    assert sample.handles == ((0xFFFFFFFFFFFFFFFF, 9, 8, 4096), (12, 3, 3, 64))
    page.restart(6, 3)
    assert (page.sample().finished_step, page.sample().finished_generation) == (6, 3)
    assert page.sample().began_step == 6
    native.close()


def test_the_median_step_time_is_over_the_last_steps(page: WorkerPage) -> None:
    for step, duration_ns in enumerate([9_000_000_000, 100, 200, 300], 1):
        page.finish_step(step, 1, duration_ns)
    assert page.sample().median_step_s == pytest.approx(200e-9)
    for step in range(5, 40):
        page.finish_step(step, 1, 1_000_000_000)
    assert page.sample().median_step_s == 1.0


def test_a_worker_process_attaches_by_descriptor(page: WorkerPage) -> None:
    code = (
        "import sys; from deadpool.liveness.progress import WorkerPage\n"
        "page = WorkerPage.attach(int(sys.argv[1])); page.finish_step(4, 1, 10); page.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(page.fd)], pass_fds=[page.fd], check=True, timeout=30)
    assert page.sample().finished_step == 4


def test_the_size_of_a_page_is_sealed_and_other_files_are_refused(page: WorkerPage) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 4096)
    fd = os.memfd_create("other")
    os.ftruncate(fd, PAGE_BYTES)
    with pytest.raises(ValueError, match="magic"):
        WorkerPage.attach(fd)
    os.ftruncate(fd, 100)
    with pytest.raises(ValueError, match="100 bytes"):
        WorkerPage.attach(fd)
    os.close(fd)


def test_a_nonsense_handle_count_does_not_read_beyond_the_page(page: WorkerPage) -> None:
    native = Native(page.fd)
    native.put(72, 1 << 60)
    assert len(page.sample().handles) == MAX_ENTRIES
    native.close()


def test_a_worker_that_steps_gives_no_verdict(rig: Rig) -> None:
    assert rig.run(60, steps=True) == []


def test_no_step_for_the_timeout_is_a_stall_said_again_after_each_further_timeout(rig: Rig) -> None:
    assert rig.run(9.75) == []
    assert rig.run(0.25) == [(ProgressChange.STALLED, 10.0)]
    assert rig.run(9.75) == []
    assert rig.run(0.25) == [(ProgressChange.STALLED, 20.0)]
    assert rig.run(0.25, steps=True) == [(ProgressChange.RESUMED, 0.0)]
    assert rig.run(9.75) == []


def test_the_first_step_of_a_process_has_a_limit_of_its_own_and_may_keep_others_waiting(
    page: WorkerPage,
) -> None:
    watch = ProgressWatch(CONFIG)
    watch.add(3, page, 0.0)
    for quarter in range(240):
        assert watch.check(quarter * POLL_S) == []
        assert watch.report()[0].is_quiet
    assert [verdict.change for verdict in watch.check(60.0)] == [ProgressChange.STALLED]
    assert not watch.report()[0].is_quiet
    page.restart(4, 2)  # after a recovery, and the process is still in its first step
    assert [verdict.change for verdict in watch.check(60.25)] == [ProgressChange.RESUMED]
    assert watch.report()[0].is_quiet
    page.finish_step(5, 2, 50_000_000)
    assert watch.check(60.5) == []
    assert not watch.report()[0].is_quiet


def test_a_rank_in_its_first_step_that_waits_in_a_collective_keeps_nobody_waiting(page: WorkerPage) -> None:
    native = Native(page.fd)
    native.put(72, 1)
    native.put(ENTRIES_OFFSET, 99, 12, 11, 1024)
    watch = ProgressWatch(CONFIG)
    watch.add(3, page, 0.0)
    watch.check(0.0)
    assert not watch.report()[0].is_quiet
    native.close()


def test_slow_steps_get_three_medians(rig: Rig) -> None:
    for step in (1, 2):
        rig.page.finish_step(step, 1, 5_000_000_000)
    assert rig.run(14.75) == []
    assert rig.run(1) == [(ProgressChange.STALLED, 15.0)]


def test_a_new_generation_counts_as_progress_even_at_an_older_step(rig: Rig) -> None:
    rig.run(8)
    rig.page.restart(0, 2)
    assert rig.run(9.75) == []


def test_a_quiet_section_suspends_the_timeout_and_the_clock_starts_anew_after_it(rig: Rig) -> None:
    rig.page.set_quiet(True)
    assert rig.run(60) == []
    rig.page.set_quiet(False)
    assert rig.run(9.75) == []
    assert rig.run(0.5) == [(ProgressChange.STALLED, 10.0)]


def test_a_quiet_section_does_not_hide_a_stopped_process(rig: Rig) -> None:
    rig.page.set_quiet(True)
    assert rig.run(3, ticks=False) == [(ProgressChange.FROZEN, 3.0)]


def test_a_tick_that_stands_still_is_frozen_once_and_resumes(rig: Rig) -> None:
    assert rig.run(2.75, ticks=False) == []
    assert rig.run(0.25, ticks=False) == [(ProgressChange.FROZEN, 3.0)]
    (report,) = rig.watch.report()
    assert (report.rank, report.tick_frozen) == (3, True)
    assert rig.run(2, ticks=False) == []
    assert [change for change, _ in rig.run(0.25)] == [ProgressChange.RESUMED]
    assert not rig.watch.report()[0].tick_frozen


def test_a_worker_whose_native_thread_does_not_run_yet_is_not_frozen(page: WorkerPage) -> None:
    watch = ProgressWatch(CONFIG)
    watch.add(0, page, 0.0)
    for quarter in range(39):
        assert watch.check(quarter * POLL_S) == []


def test_a_pause_of_the_agent_itself_is_no_stall_and_no_freeze(rig: Rig) -> None:
    rig.run(2)
    rig.now_s += 100
    assert rig.watch.check(rig.now_s) == []
    assert rig.run(2) == []
    assert [change for change, _ in rig.run(6)] == [ProgressChange.STALLED]


def test_a_rank_that_is_removed_is_not_judged_any_more(rig: Rig) -> None:
    assert rig.watch.ranks == (3,)
    rig.watch.remove(3)
    rig.watch.remove(3)
    assert rig.run(60, ticks=False) == []
    assert rig.watch.report() == ()


def test_the_report_tells_the_sequence_numbers_of_every_handle(rig: Rig) -> None:
    rig.native.put(72, 1)
    rig.native.put(ENTRIES_OFFSET, 99, 12, 11, 1024)
    rig.page.finish_step(5, 1, 1)
    (report,) = rig.watch.report()
    assert (report.finished_step, report.handles, report.tick_frozen) == (5, ((99, 12, 11, 1024),), False)
