"""What must hold (DESIGN section 4), stated once. Exhaustive search, random walks and simulator all ask it.

`Truth` is what is really there, kept by whoever drives the machine; the machine sees only events.
`check_step` compares one step of the membership machine with it. What invariants 3 and 4 mean bank by bank is
checked in `commit_world`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from deadpool.core.membership import (
    Acked,
    Effect,
    End,
    Event,
    FaultReported,
    Fence,
    Finished,
    PublishView,
    State,
    step,
)
from deadpool.core.types import (
    Ack,
    Fault,
    FaultKind,
    Inventory,
    MemberId,
    Name,
    Phase,
    RankCopies,
    ReplicatedGroup,
    Source,
    View,
)

PHASE_ORDER = {
    Phase.FORMING: 0,
    Phase.ABORTING: 1,
    Phase.STALLED: 2,
    Phase.RESTORING: 3,
    Phase.RUNNING: 4,
    Phase.FINISHED: 5,
    Phase.HALTED: 5,
}
"""Order of the phases within one generation."""


class OracleViolation(AssertionError):
    """An invariant of DESIGN section 4 does not hold; the message begins with its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is really there, whoever knows of it."""

    inventories: tuple[Inventory, ...] = ()  # complete copies, by member
    dead: frozenset[MemberId] = frozenset()
    replaceable: frozenset[MemberId] = frozenset()  # a fault was reported of them, or they missed a deadline
    acks: frozenset[Ack] = frozenset()  # in the store: those of the current generation
    protected: Name | None = None  # what status calls protected
    lost_since: int = 0  # hosts lost since then
    replicas: int = 1
    groups: tuple[ReplicatedGroup, ...] = ()

    def inventory(self, member: MemberId) -> Inventory:
        return next((i for i in self.inventories if i.member == member), Inventory(member=member))

    def with_inventory(self, inventory: Inventory) -> Truth:
        others = [i for i in self.inventories if i.member != inventory.member]
        return replace(self, inventories=tuple(sorted([*others, inventory], key=lambda i: i.member)))

    def with_death(self, member: MemberId) -> Truth:
        """The host is gone, and with it all its copies."""
        return replace(self.without(member), dead=self.dead | {member})

    def without(self, member: MemberId) -> Truth:
        """All its copies are gone: a loss, whoever caused it."""
        had = self.inventory(member).copies
        kept = tuple(i for i in self.inventories if i.member != member)
        return replace(self, inventories=kept, lost_since=self.lost_since + bool(had))


def with_copies(
    inventory: Inventory, rank: int, *, own: Iterable[Name] = (), held: Iterable[Name] = ()
) -> Inventory:
    """`inventory` with exactly these copies of `rank`."""
    entry = RankCopies(rank=rank, own=tuple(sorted(own)), held=tuple(sorted(held)))
    others = [copies for copies in inventory.copies if copies.rank != rank]
    if entry.own or entry.held:
        others.append(entry)
    return replace(inventory, copies=tuple(sorted(others, key=lambda copies: copies.rank)))


def copies_of(inventory: Inventory, rank: int) -> RankCopies:
    """The copies of `rank` in `inventory`."""
    return next((copies for copies in inventory.copies if copies.rank == rank), RankCopies(rank=rank))


def newest_live(
    world_size: int, inventories: Iterable[Inventory], groups: Iterable[ReplicatedGroup]
) -> Name | None:
    """The newest live name by its definition, found otherwise than the core finds it."""
    own: set[tuple[int, Name]] = set()
    anywhere: set[tuple[int, Name]] = set()
    for inventory in inventories:
        for copies in inventory.copies:
            own |= {(copies.rank, name) for name in copies.own}
            anywhere |= {(copies.rank, name) for name in (*copies.own, *copies.held)}
    names = sorted({name for _, name in anywhere}, reverse=True)
    for name in names:
        has_all_ranks = all((rank, name) in anywhere for rank in range(world_size))
        if has_all_ranks and all(any((rank, name) in own for rank in group.ranks) for group in groups):
            return name
    return None


def check_step(truth: Truth, before: State, event: Event, after: State, effects: tuple[Effect, ...]) -> None:
    """Compare one step of the membership machine with the truth.

    Raises:
        OracleViolation: an invariant does not hold.
    """
    views = [effect.view for effect in effects if isinstance(effect, PublishView)]
    if views and views[-1] != after.view:
        raise OracleViolation("2: the last published View is not the machine's")
    if not views and before.view != after.view:
        raise OracleViolation("2: the View changed and was not published")
    previous = before.view
    for view in views:
        _check_order(previous, view)
        _check_members(after, view)
        _check_acks(truth, view)
        previous = view
    for view in views:
        _check_state(truth, view)
    _check_dropped(truth, before, after)
    if after.view is not None:
        _check_deadline(after)
    ends = [effect for effect in effects if isinstance(effect, End)]
    if bool(ends) != any(view.phase in (Phase.FINISHED, Phase.HALTED) for view in views):
        raise OracleViolation("7: the end and the View that says so go together")


def check_stale(state: State) -> None:
    """Invariants 2 and 8: events of an older generation change nothing."""
    view = state.view
    if view is None:
        return
    old = view.generation - 1
    for event in _events_of_generation(view, old):
        after, effects = step(state, event)
        if after != state or any(not isinstance(effect, Fence) for effect in effects):
            raise OracleViolation(
                f"2: an event of generation {old} changed generation {view.generation}: {event}"
            )


def _events_of_generation(view: View, generation: int) -> list[Event]:
    events: list[Event] = []
    for slot, member in enumerate(view.slots):
        if member:
            ranks = tuple(view.ranks_of_slot(slot))
            events += [
                Acked(ack=Ack(member=member, generation=generation, phase=view.phase), now_s=0.0),
                Finished(member_id=member, generation=generation, now_s=0.0),
                FaultReported(
                    fault=Fault(
                        kind=FaultKind.WORKER_EXIT, member=member, generation=generation, ranks=ranks
                    ),
                    now_s=0.0,
                ),
                FaultReported(
                    fault=Fault(kind=FaultKind.COLLECTIVE, member=member, generation=generation), now_s=0.0
                ),
            ]
    return events


def _check_order(previous: View | None, view: View) -> None:
    if previous is None:
        return
    if view.generation not in (previous.generation, previous.generation + 1):
        raise OracleViolation(f"2: generation {previous.generation} is followed by {view.generation}")
    if view.generation > previous.generation:
        return
    if PHASE_ORDER[view.phase] <= PHASE_ORDER[previous.phase]:
        raise OracleViolation(f"2: {previous.phase} is followed by {view.phase} in one generation")
    for slot, (old, new) in enumerate(zip(previous.slots, view.slots, strict=True)):
        if old and old != new:
            raise OracleViolation(f"1: slot {slot} passes from {old} to {new} within a generation")
    if previous.rollback is not None and previous.rollback != view.rollback:
        raise OracleViolation("5: the rollback step changed within a generation")


def _check_members(state: State, view: View) -> None:
    named = [member for member in (*view.slots, *view.leaving) if member]
    if len(set(named)) != len(named):
        raise OracleViolation(f"1: a member is named twice: {named}")
    if view.phase in (Phase.FINISHED, Phase.HALTED):
        return
    if gone := set(view.slots) & state.fenced:
        raise OracleViolation(f"1: {gone} are gone and hold slots")
    if view.phase is Phase.RESTORING and view.rollback is None:
        raise OracleViolation("5: RESTORING without a step to resume from")
    if "" in view.slots and view.phase not in (Phase.ABORTING, Phase.STALLED):
        raise OracleViolation(f"7: {view.phase} with a vacant slot")
    if not set(view.joining) <= set(view.slots):
        raise OracleViolation("1: a joining member holds no slot")


def _check_acks(truth: Truth, view: View) -> None:
    """Phases are left only when everyone needed has acked."""
    if view.phase in (Phase.RESTORING, Phase.STALLED) and view.rollback is not None:
        needed, phases = {*view.slots, *view.leaving} - {*view.joining, ""}, {Phase.ABORTING}
    elif view.phase is Phase.RUNNING:
        needed, phases = set(view.slots), {Phase.RESTORING, Phase.FORMING}
    else:
        return
    acked = {a.member for a in truth.acks if a.generation == view.generation and a.phase in phases}
    if silent := needed - acked:
        raise OracleViolation(f"2: {view.phase} without the acks of {sorted(silent)}")


def _check_state(truth: Truth, view: View) -> None:
    is_lost = view.phase is Phase.HALTED and view.exit_code == 4
    is_restored = view.phase in (Phase.RESTORING, Phase.STALLED) and view.rollback is not None
    if is_lost or (is_restored and view.source is Source.CHECKPOINT):
        live = newest_live(view.world_size, truth.inventories, truth.groups)
        if live is not None:
            raise OracleViolation(f"3: given up although {live} is live")
        if truth.protected is not None and truth.lost_since <= truth.replicas:
            raise OracleViolation(f"3: {truth.lost_since} losses were claimed survivable and are not")
    if is_restored and view.source is Source.MEMORY:
        _check_acked(truth, view)
    if is_restored and truth.protected is not None and truth.lost_since <= truth.replicas:
        _check_not_older(view, truth.protected)
    if view.phase is Phase.RUNNING:
        _check_resumed(truth, view)


def _check_acked(truth: Truth, view: View) -> None:
    """The step to resume from is live in what was acked in this generation."""
    copies: list[Inventory] = []
    for ack in truth.acks:
        if ack.generation == view.generation and ack.phase is Phase.ABORTING and ack.inventory is not None:
            of_rollback = tuple(
                RankCopies(
                    rank=c.rank,
                    own=tuple(name for name in c.own if name == view.rollback),
                    held=tuple(name for name in c.held if name == view.rollback),
                )
                for c in ack.inventory.copies
            )
            copies.append(replace(ack.inventory, copies=of_rollback))
    if newest_live(view.world_size, copies, truth.groups) is None:
        raise OracleViolation(f"5: back to {view.rollback}, of which no complete set was acked")


def _check_not_older(view: View, protected: Name) -> None:
    if view.rollback is None or view.rollback < protected:
        raise OracleViolation(f"3: back to {view.rollback} although {protected} was protected")


def _check_resumed(truth: Truth, view: View) -> None:
    rollback = view.rollback
    if rollback is None:
        raise OracleViolation("5: RUNNING without a step to resume from")
    by_member = {inventory.member: inventory for inventory in truth.inventories}
    for slot, member in enumerate(view.slots):
        if member in truth.dead:
            continue  # not known yet; the next generation will tell
        copies = {c.rank: c for c in by_member[member].copies} if member in by_member else {}
        for rank in view.ranks_of_slot(slot):
            if rank not in copies or rollback not in copies[rank].own:
                raise OracleViolation(f"5: rank {rank} resumes without a copy of {rollback}")
        newest = max((name for c in copies.values() for name in (*c.own, *c.held)), default=rollback)
        if newest > rollback:
            raise OracleViolation(f"5: {member} keeps {newest}, newer than {rollback}")


def _check_dropped(truth: Truth, before: State, after: State) -> None:
    if before.view is None or after.view is None:
        return
    old = {*before.view.slots, *before.view.leaving} - {""}
    new = {*after.view.slots, *after.view.leaving}
    if dropped := old - new - truth.dead - truth.replaceable:
        raise OracleViolation(f"6: {sorted(dropped)} were dropped in good health")


def _check_deadline(state: State) -> None:
    assert state.view is not None
    if state.deadline_s is None and state.view.phase not in (Phase.RUNNING, Phase.FINISHED, Phase.HALTED):
        raise OracleViolation(f"7: {state.view.phase} has no deadline")
