"""Progress of workers: the page a worker shares with its agent, and when it makes too little.

The page is a memfd of 64 KiB made by the agent. All fields are little-endian u64, each written by one side
with one aligned store, so a reader sees old or new values and never half of one. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from statistics import median_low

from deadpool.config import LivenessConfig
from deadpool.events import boottime_s
from deadpool.liveness.pause import PauseMeter

PAGE_BYTES = 65536
PAGE_MAGIC = 0x444541445031  # "DEADP1"
ENTRIES_OFFSET = 4096
ENTRY_BYTES = 32
MAX_ENTRIES = (PAGE_BYTES - ENTRIES_OFFSET) // ENTRY_BYTES
_MEDIAN_STEPS = 31  # steps behind the median step time
_SLOW_STEPS = 3  # a step may take so many medians before it counts as stalled (DESIGN section 7)


class Field(Enum):
    """Byte offsets of the page's fields. `tick`, `closed_generation` and the entries are written natively."""

    MAGIC = 0
    TICK = 8  # counts up at least every 100 ms, also while the GIL is held
    CLOSED_GENERATION = 16
    FINISHED_STEP = 24
    FINISHED_GENERATION = 32
    BEGAN_STEP = 40  # the optimizer began this step: tensors may have changed
    BOUNDARY_NS = 48  # CLOCK_BOOTTIME at the last boundary
    QUIET = 64  # 1 in a declared quiet section
    HANDLE_COUNT = 72
    MEDIAN_STEP_NS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSample:
    """What the page says at one moment."""

    tick: int
    closed_generation: int
    finished_step: int
    finished_generation: int
    began_step: int
    boundary_ns: int
    is_quiet: bool
    median_step_s: float
    # (hash of the name, collectives issued, completed, the newest: see waiting.decode_call)
    handles: tuple[tuple[int, int, int, int], ...]


class WorkerPage:
    """One worker's page, mapped by its agent or by the worker itself."""

    def __init__(self, fd: int, *, owns_fd: bool) -> None:
        self.fd = fd
        self._owns_fd = owns_fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._durations_ns: deque[int] = deque(maxlen=_MEDIAN_STEPS)

    @classmethod
    def create(cls, name: str) -> WorkerPage:
        """Make a page of fixed size; the caller passes `fd` to the worker and closes the page."""
        if sys.byteorder != "little":
            raise OSError("worker pages are little-endian, this machine is not")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        page = cls(fd, owns_fd=True)
        page._set(Field.MAGIC, PAGE_MAGIC)
        return page

    @classmethod
    def attach(cls, fd: int) -> WorkerPage:
        """Map the page behind an inherited descriptor, which stays the caller's.

        Raises:
            ValueError: it is no worker page.
        """
        if os.fstat(fd).st_size != PAGE_BYTES:
            raise ValueError(f"descriptor {fd} is no worker page: it has {os.fstat(fd).st_size} bytes")
        page = cls(fd, owns_fd=False)
        if page.get(Field.MAGIC) != PAGE_MAGIC:
            page.close()
            raise ValueError(f"descriptor {fd} is no worker page: the magic number differs")
        return page

    def get(self, name: Field) -> int:
        return self._words[name.value // 8]

    def sample(self) -> PageSample:
        """Read everything; fields may be a moment apart, entries of new handles may be missing."""
        count = min(self.get(Field.HANDLE_COUNT), MAX_ENTRIES)
        first = ENTRIES_OFFSET // 8
        handles = []
        for place in range(first, first + count * ENTRY_BYTES // 8, ENTRY_BYTES // 8):
            name, issued, completed, last_call = self._words[place : place + 4]
            handles.append((name, issued, completed, last_call))
        return PageSample(
            tick=self.get(Field.TICK),
            closed_generation=self.get(Field.CLOSED_GENERATION),
            finished_step=self.get(Field.FINISHED_STEP),
            finished_generation=self.get(Field.FINISHED_GENERATION),
            began_step=self.get(Field.BEGAN_STEP),
            boundary_ns=self.get(Field.BOUNDARY_NS),
            is_quiet=self.get(Field.QUIET) != 0,
            median_step_s=self.get(Field.MEDIAN_STEP_NS) / 1e9,
            handles=tuple(handles),
        )

    def begin_optimizer(self, step: int) -> None:
        """The optimizer of `step` is about to change tensors."""
        self._set(Field.BEGAN_STEP, step)

    def finish_step(self, step: int, generation: int, duration_ns: int) -> None:
        """The boundary of `step` is passed."""
        self._durations_ns.append(duration_ns)
        self._set(Field.MEDIAN_STEP_NS, median_low(self._durations_ns))
        self._set(Field.BOUNDARY_NS, int(boottime_s() * 1e9))
        self._set(Field.FINISHED_GENERATION, generation)
        self._set(Field.FINISHED_STEP, step)

    def restart(self, step: int, generation: int) -> None:
        """The worker stands restored at `step`; the next one has not begun."""
        self._set(Field.BEGAN_STEP, step)
        self._set(Field.BOUNDARY_NS, int(boottime_s() * 1e9))
        self._set(Field.FINISHED_GENERATION, generation)
        self._set(Field.FINISHED_STEP, step)

    def set_quiet(self, is_quiet: bool) -> None:
        """Enter or leave a declared quiet section."""
        self._set(Field.QUIET, int(is_quiet))

    def close(self) -> None:
        """Unmap; the creator's descriptor is closed too."""
        self._words.release()
        self._map.close()
        if self._owns_fd:
            self._owns_fd = False
            os.close(self.fd)

    def _set(self, name: Field, value: int) -> None:
        self._words[name.value // 8] = value


class ProgressChange(Enum):
    """What the watch says of a worker."""

    STALLED = "stalled"  # no finished step for too long; said again after each further limit
    FROZEN = "frozen"  # its native thread stands still: the process is stopped
    RESUMED = "resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressVerdict:
    """One change of mind about one worker."""

    rank: int
    change: ProgressChange
    finished_step: int
    age_s: float  # since the last step, or since the last tick with FROZEN


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """What an agent says of one of its workers when somebody asks who is to blame."""

    rank: int
    tick_frozen: bool
    finished_step: int
    is_quiet: bool  # in a declared quiet section, or in its first step: it may keep others waiting
    handles: tuple[tuple[int, int, int, int], ...]  # as in PageSample


@dataclass(slots=True, kw_only=True)
class _Watched:
    page: WorkerPage
    step_s: float  # when the last advance was seen
    tick_s: float
    step: tuple[int, int] = (0, 0)  # generation, step
    tick: int = 0
    stalls: int = 0  # limits passed since the last advance
    is_frozen: bool = False
    verdicts: list[ProgressVerdict] = field(default_factory=list)


class ProgressWatch:
    """Decides which workers of this host make no progress; no thread, no clock of its own.

    Watch a rank only while it is expected to make progress (the View is RUNNING and the rank is in `train`).
    A stall is no verdict of guilt: in a collective everybody stalls, and sequence numbers name the culprit.

    The first step of a process compiles kernels and opens connections, often for minutes and on some ranks
    only: it has a limit of its own, and until then the rank keeps others waiting by right.

    A declared quiet section suspends the progress timeout, not the tick: the native thread ticks while the
    GIL is held, too, so a tick that stands still is a stopped process. Pauses of this process do not count.
    """

    def __init__(self, config: LivenessConfig) -> None:
        self._config = config
        self._pauses = PauseMeter(config.silence_suspect_s / 2)
        self._watched: dict[int, _Watched] = {}
        self._checked_s = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._watched)

    def add(self, rank: int, page: WorkerPage, now_s: float) -> None:
        """Expect progress of `rank` from now on."""
        sample = page.sample()
        self._watched[rank] = _Watched(
            page=page,
            step_s=now_s,
            tick_s=now_s,
            step=(sample.finished_generation, sample.finished_step),
            tick=sample.tick,
        )

    def remove(self, rank: int) -> None:
        """Expect none any more; an unknown rank is ignored."""
        self._watched.pop(rank, None)

    def clear(self) -> None:
        self._watched.clear()

    def check(self, now_s: float) -> list[ProgressVerdict]:
        """Look at all pages; to be called at least every `silence_suspect_s` / 2. `now_s`: CLOCK_BOOTTIME."""
        paused_s = self._pauses.tick(now_s)
        self._checked_s = now_s
        verdicts: list[ProgressVerdict] = []
        for rank, watched in self._watched.items():
            watched.step_s = min(now_s, watched.step_s + paused_s)
            watched.tick_s = min(now_s, watched.tick_s + paused_s)
            verdicts.extend(self._look(rank, watched, now_s))
        return verdicts

    def report(self) -> tuple[WorkerProgress, ...]:
        """What the pages say now; `tick_frozen` as of the last check."""
        reports = []
        for rank, watched in sorted(self._watched.items()):
            sample = watched.page.sample()
            # One that waits in a collective itself keeps nobody waiting.
            waits = any(completed < issued for _, issued, completed, _ in sample.handles)
            is_young = self._checked_s - watched.step_s < self._limit_s(sample)
            is_first = _is_first_step(sample) and is_young and not waits
            reports.append(
                WorkerProgress(
                    rank=rank,
                    tick_frozen=watched.is_frozen and sample.tick == watched.tick,
                    finished_step=sample.finished_step,
                    is_quiet=sample.is_quiet or is_first,
                    handles=sample.handles,
                )
            )
        return tuple(reports)

    def _limit_s(self, sample: PageSample) -> float:
        if _is_first_step(sample):
            return max(self._config.progress_timeout_s, self._config.first_step_timeout_s)
        return max(self._config.progress_timeout_s, _SLOW_STEPS * sample.median_step_s)

    def _look(self, rank: int, watched: _Watched, now_s: float) -> list[ProgressVerdict]:
        sample = watched.page.sample()
        was_well = not watched.is_frozen and not watched.stalls
        step = (sample.finished_generation, sample.finished_step)
        if step != watched.step or sample.is_quiet:
            watched.step, watched.step_s, watched.stalls = step, now_s, 0
        if sample.tick != watched.tick:
            watched.tick, watched.tick_s, watched.is_frozen = sample.tick, now_s, False

        def verdict(change: ProgressChange, since_s: float) -> ProgressVerdict:
            return ProgressVerdict(
                rank=rank, change=change, finished_step=sample.finished_step, age_s=now_s - since_s
            )

        found = []
        if now_s - watched.step_s >= self._limit_s(sample) * (watched.stalls + 1):
            watched.stalls += 1
            found.append(verdict(ProgressChange.STALLED, watched.step_s))
        # A tick of 0 means that the native thread does not run yet.
        if watched.tick and not watched.is_frozen and now_s - watched.tick_s >= self._config.silence_dead_s:
            watched.is_frozen = True
            found.append(verdict(ProgressChange.FROZEN, watched.tick_s))
        if not was_well and not watched.is_frozen and not watched.stalls:
            found.append(verdict(ProgressChange.RESUMED, watched.step_s))
        return found


def _is_first_step(sample: PageSample) -> bool:
    """Whether this process has finished no step yet, whatever the job has."""
    return sample.median_step_s == 0
