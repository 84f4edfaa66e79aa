"""Topology -> which slots hold the copies of which slot. Pure: the same answer everywhere.

Holders are slots, not members, so a promoted member inherits what its slot holds. All ranks of a host go to
the same hosts: one TCP peer, one place to look. `domains` names the failure domain (rack, switch, block) of
each slot's member; "" or a missing entry means that the host is a domain of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from deadpool.core.types import MemberId, View

Placement = tuple[tuple[int, ...], ...]
"""[n_slots] slot -> the slots that hold its copies."""


def holders(slot: int, n_slots: int, domains: Sequence[str] = (), r: int = 1) -> tuple[int, ...]:
    """Slots that hold the copies of `slot` in a fresh placement (see `place`).

    A running job reads `View.holders` instead: there the placement of the generation before is kept.
    """
    return place(n_slots, domains, r)[slot]


def place(n_slots: int, domains: Sequence[str] = (), r: int = 1, current: Placement = ()) -> Placement:
    """Give every slot `r` holders in failure domains other than its own and each other's.

    A fresh placement is one rotation for all slots where such a rotation exists: then every host holds the
    copies of exactly r hosts, and no rack of neighbours piles up on one holder. Otherwise each slot takes the
    least loaded, nearest slots that satisfy the rule, or that come closest to it.

    Args:
        n_slots: active hosts.
        domains: [n_slots] failure domain of each slot's member.
        r: replication factor, at least 1; fewer holders are named if there are not enough hosts.
        current: placement to keep wherever the rule still holds or cannot be met any better.

    Returns:
        [n_slots] slot -> holders, never the slot itself.
    """
    labels = [(domains[i] if i < len(domains) else "") or f"slot {i}" for i in range(n_slots)]
    count = min(r, n_slots - 1)
    if len(current) != n_slots:
        rotations = _rotations(labels, count)
        if len(rotations) == count:
            return tuple(tuple((i + shift) % n_slots for shift in rotations) for i in range(n_slots))
        current = ((),) * n_slots
    kept = [now if _obeys(i, now, labels, count) else None for i, now in enumerate(current)]
    load = [0] * n_slots
    for entry in kept:
        for holder in entry or ():
            load[holder] += 1
    result: list[tuple[int, ...]] = []
    for i, entry in enumerate(kept):
        if entry is None:
            entry = _choose(i, labels, count, load)
            if not _obeys(i, entry, labels, count) and len(set(current[i]) - {i}) == count:
                entry = current[i]  # no better than before: copies stay where they are
            for holder in entry:
                load[holder] += 1
        result.append(entry)
    return tuple(result)


def replicated_is_safe(group_ranks: Sequence[int], nproc: int, domains: Sequence[str], r: int = 1) -> bool:
    """Whether bytes equal on `group_ranks` outlive any `r` failure domains: they span at least r + 1."""
    slots = {rank // nproc for rank in group_ranks}
    return len({(domains[i] if i < len(domains) else "") or f"slot {i}" for i in slots}) >= r + 1


def held_slots(view: View, member: MemberId) -> tuple[int, ...]:
    """Slots whose copies `member` holds under `view`."""
    if member not in view.slots:
        return ()
    own = view.slots.index(member)
    return tuple(slot for slot, entry in enumerate(view.holders) if own in entry)


def _rotations(labels: Sequence[str], count: int) -> list[int]:
    n_slots = len(labels)
    chosen: list[int] = []
    for shift in range(1, n_slots):
        if len(chosen) == count:
            break
        if all(
            labels[(i + shift) % n_slots] not in {labels[(i + other) % n_slots] for other in (0, *chosen)}
            for i in range(n_slots)
        ):
            chosen.append(shift)
    return chosen


def _obeys(slot: int, entry: tuple[int, ...], labels: Sequence[str], count: int) -> bool:
    return len(entry) == count and len({labels[i] for i in (slot, *entry)}) == count + 1


def _choose(slot: int, labels: Sequence[str], count: int, load: Sequence[int]) -> tuple[int, ...]:
    n_slots = len(labels)
    chosen: list[int] = []
    while len(chosen) < count:
        taken = {labels[i] for i in chosen}

        def cost(i: int, taken: set[str] = taken) -> tuple[bool, bool, int, int]:
            return labels[i] == labels[slot], labels[i] in taken, load[i], (i - slot) % n_slots

        chosen.append(min((i for i in range(n_slots) if i != slot and i not in chosen), key=cost))
    return tuple(chosen)
