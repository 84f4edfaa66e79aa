"""What the kernel says of a process. For tidying up and for tests only: detection never looks here."""

from __future__ import annotations

import os


def read_stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on (the name before it may contain anything), or None."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def state_of(pid: int) -> str:
    """State of a process as one letter (R, S, D, T stopped, Z ended and not reaped); "" if there is none."""
    stat = read_stat(pid)
    return "" if stat is None else stat[0]


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    return state_of(pid) not in ("", "Z", "X")


def parent_of(pid: int) -> int | None:
    """Parent of a process, or None if there is no such process."""
    stat = read_stat(pid)
    return None if stat is None else int(stat[1])


def started_s(pid: int) -> float | None:
    """When a process started, on the clock of `boottime_s`, or None if it does not run (any more)."""
    stat = read_stat(pid)
    return None if stat is None or stat[0] in "ZX" else int(stat[19]) / os.sysconf("SC_CLK_TCK")
