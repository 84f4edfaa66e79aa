"""Ranks that wait for one another in different collectives: who calls what. Pure.

A rank that calls a collective which its peers do not call (a cached answer that only some of them have, an
`if` on a value that differs) waits for ever, and so do they: nobody is late, so nobody can be blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROOTED = frozenset({"gather", "scatter", "reduce", "broadcast"})
"""Operations in which members may bring different amounts."""

_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The newest collective of one group on one rank."""

    group: int  # hash of the group's name: the same on every member
    sequence: int  # collectives issued on the group in this generation; this one is the last of them
    is_waiting: bool
    operation: str
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """What one rank has called."""

    rank: int
    calls: tuple[Call, ...]


def find_disagreement(reports: Sequence[RankCalls]) -> tuple[tuple[int, Call], ...]:
    """Name the ranks that keep one another waiting, each with the call that it waits in.

    Two ways to disagree: members of a group are at the same place of its sequence with different calls; or
    ranks wait in a ring, each in a call that the next one has not come to. A rank that computes, or stands
    still outside of any collective, is late and disagrees with nobody.

    Args:
        reports: of all ranks that answered, as of about one moment.

    Returns:
        (rank, call) in order of ranks; () if they agree.
    """
    waiting = {
        (report.rank, call.group): call for report in reports for call in report.calls if call.is_waiting
    }
    found = {key for key in waiting if _differs(waiting[key], _peers(waiting, key))}
    found |= _in_rings(reports, waiting)
    return tuple((rank, waiting[rank, group]) for rank, group in sorted(found))


def _peers(waiting: dict[tuple[int, int], Call], key: tuple[int, int]) -> Iterable[Call]:
    rank, group = key
    return (call for (other, its), call in waiting.items() if its == group and other != rank)


def _differs(call: Call, others: Iterable[Call]) -> bool:
    for other in others:
        if other.sequence != call.sequence:
            continue
        pair = {call.operation, other.operation}
        if pair <= _POINT_TO_POINT:
            if call.n_bytes != other.n_bytes:
                return True
        elif len(pair) > 1 or (call.n_bytes != other.n_bytes and call.operation not in _ROOTED):
            return True
    return False


def _in_rings(reports: Sequence[RankCalls], waiting: dict[tuple[int, int], Call]) -> set[tuple[int, int]]:
    """Waits whose rank is, over the ranks that it waits for, waited for by itself."""
    issued = {(report.rank, call.group): call.sequence for report in reports for call in report.calls}
    members: dict[int, list[int]] = {}
    for rank, group in issued:
        members.setdefault(group, []).append(rank)
    waits_for: dict[int, set[int]] = {}
    via: dict[tuple[int, int], set[int]] = {}
    for (rank, group), call in waiting.items():
        late = {other for other in members[group] if issued[other, group] < call.sequence}
        waits_for.setdefault(rank, set()).update(late)
        via[rank, group] = late
    reached = {rank: _reach(rank, waits_for) for rank in waits_for}
    return {
        (rank, group)
        for (rank, group), late in via.items()
        if any(rank in reached.get(other, ()) for other in late)
    }


def _reach(start: int, waits_for: dict[int, set[int]]) -> set[int]:
    """Ranks that `start` waits for, directly or over others."""
    seen: set[int] = set()
    left = list(waits_for[start])
    while left:
        rank = left.pop()
        if rank not in seen:
            seen.add(rank)
            left += waits_for.get(rank, ())
    return seen
