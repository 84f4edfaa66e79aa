"""Self-test of a host before it may serve as a spare: memory, clocks and the kernel features we stand on.

Whether torch loads is tested by the worker, which must load it anyway; what takes no time here proves little
about a device. A host that fails registers no member: it says why and ends.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import time
from dataclasses import dataclass

TEST_BYTES = 32 << 20
_CLOCK_PROBE_S = 0.02
_CLOCK_RATIO_LIMIT = 0.5  # clocks that disagree by half over a probe are broken, not noisy
_EARLIEST_WALL_S = 1_704_067_200  # 2024-01-01: before this project, so the clock was never set


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """What the self-test found; healthy without problems."""

    problems: tuple[str, ...]
    seconds: float

    @property
    def is_healthy(self) -> bool:
        return not self.problems


def check_health(test_bytes: int = TEST_BYTES) -> HealthReport:
    """Run every check and collect what is wrong; takes about 0.1 s."""
    started_s = time.monotonic()
    checks = (check_memory(test_bytes), check_clocks(), check_kernel())
    problems = tuple(problem for problem in checks if problem is not None)
    return HealthReport(problems=problems, seconds=time.monotonic() - started_s)


def check_memory(test_bytes: int) -> str | None:
    """Write a pattern into fresh pages of a memfd and read it back twice; a problem, or None."""
    block = hashlib.shake_256(b"deadpool self-test").digest(1 << 16)
    blocks = max(1, test_bytes // len(block))
    expected = (
        hashlib.sha256(block * 16).digest() if blocks >= 16 else hashlib.sha256(block * blocks).digest()
    )
    stretch = min(blocks, 16) * len(block)
    try:
        fd = os.memfd_create("deadpool-self-test", os.MFD_CLOEXEC)
    except OSError as error:
        return f"memory: memfd_create fails: {error.strerror}"
    try:
        os.ftruncate(fd, blocks * len(block))
        with mmap.mmap(fd, blocks * len(block)) as area:
            for place in range(0, len(area), len(block)):
                area[place : place + len(block)] = block
            for place in range(0, len(area) - stretch + 1, stretch):
                if hashlib.sha256(area[place : place + stretch]).digest() != expected:
                    return f"memory: what was written at byte {place} of {len(area)} reads back differently"
    except (OSError, ValueError) as error:
        return f"memory: {blocks * len(block) >> 20} MiB cannot be had: {error}"
    finally:
        os.close(fd)
    return None


def check_clocks() -> str | None:
    """Clocks must advance together and the wall clock must have been set; a problem, or None."""
    names = {"CLOCK_MONOTONIC": time.CLOCK_MONOTONIC, "CLOCK_BOOTTIME": time.CLOCK_BOOTTIME}
    before = {name: time.clock_gettime(clock) for name, clock in names.items()}
    time.sleep(_CLOCK_PROBE_S)
    passed = {name: time.clock_gettime(clock) - before[name] for name, clock in names.items()}
    for name, seconds in passed.items():
        if seconds < _CLOCK_PROBE_S * (1 - _CLOCK_RATIO_LIMIT):
            return f"clock: {name} advanced {seconds:.4f} s during a sleep of {_CLOCK_PROBE_S} s"
    apart_s = abs(passed["CLOCK_MONOTONIC"] - passed["CLOCK_BOOTTIME"])
    if apart_s > _CLOCK_PROBE_S * _CLOCK_RATIO_LIMIT and apart_s > _CLOCK_RATIO_LIMIT * max(passed.values()):
        return f"clock: CLOCK_MONOTONIC and CLOCK_BOOTTIME are {apart_s:.4f} s apart after {_CLOCK_PROBE_S} s"
    if time.time() < _EARLIEST_WALL_S:
        return f"clock: the wall clock says {time.strftime('%Y-%m-%d', time.gmtime())}; set it (NTP)"
    return None


def check_kernel() -> str | None:
    """Process watch and store need pidfds, eventfds and memfds; a problem, or None."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError as error:
        return f"kernel: pidfd_open fails ({error.strerror}); Linux 5.3 or newer is needed"
    try:
        with select.epoll() as epoll:
            epoll.register(pidfd, select.EPOLLIN)
    except OSError as error:
        return f"kernel: a pidfd cannot be waited for ({error.strerror})"
    finally:
        os.close(pidfd)
    return None
