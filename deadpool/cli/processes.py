"""Processes of this machine as /proc shows them."""

from __future__ import annotations

import contextlib
import os
import signal


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            parent = parent_of(int(entry.name))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.extend(below)
        waiting.extend(below)
    return found


def parent_of(pid: int) -> int | None:
    """Parent of a process, or None if there is no such process."""
    stat = _read_stat(pid)
    return None if stat is None else int(stat[1])


def started_s(pid: int) -> float | None:
    """When a process started, on the clock of `boottime_s`, or None if it does not run (any more)."""
    stat = _read_stat(pid)
    return None if stat is None or stat[0] in "ZX" else int(stat[19]) / os.sysconf("SC_CLK_TCK")


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal a process; one that is already gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _read_stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on (the name before it may contain anything)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
