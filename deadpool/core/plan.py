"""Inventories -> the step to resume from, and what each rank fetches from whom.

Pure: the same answer everywhere. A verdict on what is lost comes from acked inventories only, never from who
died.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deadpool.core import bitset
from deadpool.core.types import Ack, Inventory, MemberId, Name, ReplicatedGroup, Source, View


class NoLiveCopy(Exception):
    """A rank's copy of the rollback step is in no inventory: the plan does not fit the View."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """How one rank's member comes by the rollback step, before the worker restores from its own bank."""

    rank: int
    unique_from: MemberId | None = None
    """Member to fetch unique bytes and blob from; None: the own bank has them. May be the rank's own member
    (it holds a replica of the rank it now owns): then the bytes are copied locally."""
    replicated_from: tuple[tuple[int, int, MemberId], ...] = ()
    """(index into `groups`, source rank, its member) for each replicated group the own bank lacks."""


def merge_groups(acks: Iterable[Ack]) -> tuple[ReplicatedGroup, ...]:
    """Replicated groups of all layouts, in an order that does not depend on the order of the acks."""
    return tuple(sorted({group for ack in acks for group in ack.groups}, key=lambda group: group.ranks))


def newest_live_name(
    world_size: int, inventories: Iterable[Inventory], groups: Sequence[ReplicatedGroup] = ()
) -> Name | None:
    """The newest snapshot of which every rank has a live copy, or None.

    Live: unique bytes and blob complete with the owner or a holder, for every rank, AND for each replicated
    group one member whose OWN bank holds that name (holders receive no replicated bytes).

    Args:
        world_size: logical ranks.
        inventories: of the members that answered in this generation, and of nobody else.
        groups: replicated groups (`merge_groups`).
    """
    own, any_copy = _index(inventories)
    live = [
        name
        for name, ranks in any_copy.items()
        if ranks == bitset.full(world_size)
        and all(own.get(name, 0) & bitset.of(group.ranks) for group in groups)
    ]
    return max(live, default=None)


def plan_recovery(
    view: View, inventories: Sequence[Inventory], groups: Sequence[ReplicatedGroup] = ()
) -> tuple[RankPlan, ...]:
    """Decide what every rank fetches to resume from `view.rollback`.

    Sources that stay are preferred to members that leave, and are spread over the ranks of a group.

    Args:
        view: RESTORING view with every slot filled.
        inventories: acked in this generation (those that `rollback` was fixed from).
        groups: replicated groups (`merge_groups`).

    Returns:
        [world_size] one plan per rank; () if the state comes from the checkpoint.

    Raises:
        NoLiveCopy: some rank's copy is in no inventory.
    """
    rollback = view.rollback
    if rollback is None or view.source is Source.CHECKPOINT:
        return ()
    owners: dict[int, list[MemberId]] = {}
    sources: dict[int, list[MemberId]] = {}
    for inventory in sorted(inventories, key=lambda i: (i.member in view.leaving, i.member)):
        for copies in inventory.copies:
            if rollback in copies.own:
                owners.setdefault(copies.rank, []).append(inventory.member)
            if rollback in copies.held or rollback in copies.own:
                sources.setdefault(copies.rank, []).append(inventory.member)
    groups_of: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        for rank in group.ranks:
            groups_of.setdefault(rank, []).append(index)
    staying = [[r for r in g.ranks if r in owners and owners[r][0] not in view.leaving] for g in groups]
    leaving = [[r for r in g.ranks if r in owners] for g in groups]
    plans = []
    for rank in range(view.world_size):
        if view.member_of_rank(rank) in owners.get(rank, ()):
            plans.append(RankPlan(rank=rank))
            continue
        if rank not in sources:
            raise NoLiveCopy(f"rank {rank}: no live copy of {rollback}")
        replicated = []
        for index in groups_of.get(rank, ()):
            candidates = staying[index] or leaving[index]
            if not candidates:
                raise NoLiveCopy(f"rank {rank}: no owner in its replicated group {index} has {rollback}")
            source = candidates[rank % len(candidates)]
            replicated.append((index, source, owners[source][0]))
        plans.append(RankPlan(rank=rank, unique_from=sources[rank][0], replicated_from=tuple(replicated)))
    return tuple(plans)


def kept_names(world_size: int, inventories: Iterable[Inventory], rollback: Name) -> frozenset[Name]:
    """Names whose copies stay when a generation resumes from `rollback`.

    All others are emptied before RESTORING is acked. Newer ones belong to a future that will not happen;
    kept, they would be taken for copies of it. Older ones stay if every rank has them: until `rollback` is
    replicated again they are what a second loss falls back to. An older one that some rank lacks is of no use
    and would stand in the way of those two.

    Args:
        world_size: logical ranks.
        inventories: acked in this generation.
        rollback: `View.rollback`.
    """
    _, any_copy = _index(inventories)
    everyone = bitset.full(world_size)
    older = {name for name, ranks in any_copy.items() if ranks == everyone and name < rollback}
    return frozenset({*older, rollback})


def _index(inventories: Iterable[Inventory]) -> tuple[dict[Name, int], dict[Name, int]]:
    own: dict[Name, int] = {}
    any_copy: dict[Name, int] = {}
    for inventory in inventories:
        for copies in inventory.copies:
            bit = 1 << copies.rank
            for name in copies.own:
                own[name] = own.get(name, 0) | bit
                any_copy[name] = any_copy.get(name, 0) | bit
            for name in copies.held:
                any_copy[name] = any_copy.get(name, 0) | bit
    return own, any_copy
