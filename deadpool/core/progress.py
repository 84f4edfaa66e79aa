"""Who keeps the others waiting: the culprit of a stuck job, from sequence numbers of collectives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleProgress:
    """Collectives of one communicator handle on one rank."""

    name_hash: int  # of the handle's name: the same on every rank of the group
    issued: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """What one worker's page says, read by its agent."""

    rank: int
    tick_frozen: bool  # its native listener has not ticked for the whole progress timeout: stopped, not busy
    finished_step: int
    handles: tuple[HandleProgress, ...]
    is_quiet: bool = False  # in a section that the script declared quiet: it may take as long as it takes


def is_waiting(reports: Sequence[RankProgress]) -> bool:
    """Whether ranks wait in collectives, and none of them is quiet on purpose."""
    handles = (handle for report in reports for handle in report.handles)
    return not any(report.is_quiet for report in reports) and any(
        handle.completed < handle.issued for handle in handles
    )


def find_culprits(reports: Sequence[RankProgress]) -> tuple[int, ...]:
    """Name the ranks that the others wait for.

    Rank a waits for rank b if a has an uncompleted collective on a handle of both that b has not issued. The
    culprits are waited for and wait for nobody, so that blame goes down a chain of groups to its end: tensor
    group waits for pipeline group waits for the stopped rank. Outstanding collectives that everybody issued
    make nobody wait for anybody; then only a frozen tick tells. Where some candidates are frozen, only those
    are named: the others are behind because of them. A rank in a quiet section keeps others waiting by right:
    while it is among those waited for, nobody is named, unless its process is frozen.

    Args:
        reports: one per rank whose agent answered; call it once the progress timeout has passed.

    Returns:
        Culprits in ascending order; () if nobody waits or nothing tells who is at fault.
    """
    by_handle: dict[int, list[tuple[int, HandleProgress]]] = {}
    waits = False
    for report in reports:
        for handle in report.handles:
            by_handle.setdefault(handle.name_hash, []).append((report.rank, handle))
            waits = waits or handle.completed < handle.issued
    if not waits:
        return ()
    frozen = {report.rank for report in reports if report.tick_frozen}
    blamed: set[int] = set()
    waiting: set[int] = set()
    for entries in by_handle.values():
        lowest = min(handle.issued for _, handle in entries)
        highest_waiting = max((h.issued for _, h in entries if h.completed < h.issued), default=0)
        for rank, handle in entries:
            if handle.issued < highest_waiting:
                blamed.add(rank)
            if handle.completed < handle.issued and handle.issued > lowest:
                waiting.add(rank)
    ends = blamed - waiting
    quiet = {report.rank for report in reports if report.is_quiet}
    if ends & quiet and not ends & frozen:
        return ()
    return tuple(sorted(ends & frozen or ends or frozen))
