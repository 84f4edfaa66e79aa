"""A small world around the membership machine: agents that ack, copies that move, hosts that die unseen.

The agents' side is modelled (what an ack of a phase means for the copies on that host); the leader's side is
the machine of the core, unchanged. Driven by the exhaustive search and the random walk of the property tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from deadpool.core.membership import (
    Acked,
    CheckpointFound,
    Event,
    FaultReported,
    Fence,
    LeaderElected,
    LeaseExpired,
    Limits,
    MemberJoined,
    State,
    Tick,
    initial_state,
    step,
)
from deadpool.core.plan import NoLiveCopy, kept_names, merge_groups, plan_recovery
from deadpool.core.types import (
    Ack,
    Fault,
    FaultKind,
    Member,
    MemberId,
    Name,
    Phase,
    ReplicatedGroup,
    Source,
    View,
)
from deadpool.testing.oracle import OracleViolation, Truth, check_stale, check_step, copies_of, with_copies


class World(NamedTuple):
    """Everything at one instant. The clock stands at 0: `rebase` moves all deadlines instead."""

    state: State
    truth: Truth
    step: int  # newest one captured anywhere
    kills: int  # left to happen, as the others below
    joins: int
    faults: int
    deadlines: int
    elections: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Which world, and what may happen in it."""

    slots: int = 3
    spares: int = 1
    nproc: int = 1
    kills: int = 0
    joins: int = 0
    faults: int = 0
    fault_kinds: tuple[FaultKind, ...] = (FaultKind.WORKER_EXIT,)
    deadlines: int = 0
    elections: int = 0
    last_step: int = 1
    replicated: tuple[int, ...] = ()  # ranks that hold the same bytes
    checkpoint: bool = False


def make_member(index: int, nproc: int = 1, **more: object) -> Member:
    """A member named m<index> on host h<index>."""
    member = Member(
        id=f"m{index}",
        host=f"h{index}",
        address="127.0.0.1",
        control_port=1,
        data_port=2,
        rendezvous_port=3,
        nproc=nproc,
    )
    return replace(member, **more)  # type: ignore[arg-type]


def initial_world(setup: Setup, limits: Limits | None = None) -> World:
    """The job runs: snapshot 0 is committed everywhere."""
    state = initial_state(limits or Limits(), setup.slots, setup.nproc)
    groups = (ReplicatedGroup(ranks=setup.replicated),) if setup.replicated else ()
    world = World(
        state,
        Truth(groups=groups, replicas=min(1, setup.slots - 1)),
        0,
        setup.kills,
        setup.joins,
        setup.faults,
        setup.deadlines,
        setup.elections,
    )
    world = feed(world, LeaderElected(view=None, members=(), now_s=0.0))
    if setup.checkpoint:
        world = feed(world, CheckpointFound(name=None, now_s=0.0))
    for index in range(setup.slots + setup.spares):
        world = feed(world, MemberJoined(member=make_member(index, setup.nproc), now_s=0.0))
    for index in range(setup.slots):
        world = acknowledge(world, f"m{index}")
    if setup.checkpoint:
        world = feed(world, CheckpointFound(name=Name(step=0, generation=1), now_s=0.0))
    return commit(world, Name(step=0, generation=1))


def feed(world: World, event: Event) -> World:
    """Deliver one event and ask the oracle."""
    state, effects = step(world.state, event)
    truth = world.truth
    for effect in effects:
        if isinstance(effect, Fence) and effect.member_id not in truth.dead:
            truth = truth.without(effect.member_id)  # its agent empties its store
    check_step(truth, world.state, event, state, effects)
    old, new = world.state.view, state.view
    if new is not None and new.phase is Phase.RUNNING and old != new:
        truth = replace(truth, protected=None, lost_since=0)  # until the rollback step is replicated again
    return world._replace(state=rebase(state, event.now_s), truth=truth)


def rebase(state: State, now_s: float) -> State:
    """The same state with the clock set back to 0, so that equal situations are equal states."""
    if now_s == 0:
        return state

    def earlier(time_s: float | None) -> float | None:
        return None if time_s is None else time_s - now_s

    return replace(
        state,
        deadline_s=earlier(state.deadline_s),
        suspected_at_s=earlier(state.suspected_at_s),
        unconfirmed_at_s=earlier(state.unconfirmed_at_s),
        grace_until_s=state.grace_until_s - now_s,
    )


def moves(world: World, setup: Setup) -> Iterator[tuple[str, World]]:
    """All that can happen next. A violation raises."""
    state, truth = world.state, world.truth
    view = state.view
    assert view is not None
    if view.phase in (Phase.FINISHED, Phase.HALTED):
        return
    known = {member.id for member in state.members}
    for member in sorted(truth.dead & (known | {*view.slots, *view.leaving})):
        yield f"the death of {member} is noticed", feed(world, LeaseExpired(member_id=member, now_s=0.0))
    for member in _ackers(world, view):
        yield f"{member} acks {view.phase.name}", acknowledge(world, member)
    if world.kills:
        for member in sorted(known - truth.dead):
            yield f"{member} dies", kill(world, member)
    if world.joins:
        index = setup.slots + setup.spares + setup.joins - world.joins
        joined = world._replace(joins=world.joins - 1)
        yield f"m{index} joins", feed(joined, MemberJoined(member=make_member(index, setup.nproc), now_s=0.0))
    if world.faults:
        for kind in setup.fault_kinds:
            for member in view.slots:
                if member and member not in truth.dead:
                    yield f"{kind.name} on {member}", report_fault(world, kind, member)
    if world.deadlines and state.deadline_s is not None:
        yield "the deadline passes", pass_deadline(world)
    if world.elections:
        yield "another leader is elected", elect(world)
    if view.phase is Phase.RUNNING and not truth.dead & set(view.slots):
        yield from _running_moves(world, setup, view)


def _running_moves(world: World, setup: Setup, view: View) -> Iterator[tuple[str, World]]:
    if world.truth.protected is None:
        assert view.rollback is not None
        yield "the rollback step is protected again", commit(world, view.rollback)
        return
    if world.step < setup.last_step:
        name = Name(step=world.step + 1, generation=view.generation)
        yield f"{name} is committed", commit(world._replace(step=name.step), name)
        yield f"{name} is captured by rank 0 only", capture_one(world._replace(step=name.step), name)


def _ackers(world: World, view: View) -> list[MemberId]:
    state, truth = world.state, world.truth
    if view.phase not in (Phase.FORMING, Phase.ABORTING, Phase.RESTORING):
        return []
    if view.phase is not Phase.ABORTING and truth.dead & set(view.slots):
        return []  # nobody can build communicators with the dead
    members = [m for slot, m in enumerate(view.slots) if m and not state.acked >> slot & 1]
    if view.phase is Phase.ABORTING:
        members += [m for index, m in enumerate(view.leaving) if not state.acked_leaving >> index & 1]
    return [member for member in members if member not in truth.dead]


def acknowledge(world: World, member: MemberId) -> World:
    """What the agent of `member` does in the current phase, and its ack."""
    view = world.state.view
    assert view is not None
    truth = world.truth
    ack = Ack(member=member, generation=view.generation, phase=view.phase, groups=truth.groups)
    match view.phase:
        case Phase.FORMING:
            name = view.rollback or Name(step=0, generation=view.generation)
            truth = replace(_placed(truth, view, view.slots.index(member), (name,)), protected=None)
        case Phase.ABORTING:
            ack = replace(ack, inventory=truth.inventory(member))
        case Phase.RESTORING:
            truth = _restored(world, view, member)
    current = {known for known in truth.acks if known.generation == view.generation}
    truth = replace(truth, acks=frozenset({*current, ack}))
    return feed(world._replace(truth=truth), Acked(ack=ack, now_s=0.0))


def _restored(world: World, view: View, member: MemberId) -> Truth:
    truth = world.truth
    rollback = view.rollback
    assert rollback is not None
    acks = [ack for ack in truth.acks if ack.generation == view.generation]
    inventories = [ack.inventory for ack in acks if ack.inventory is not None]
    try:
        plans = plan_recovery(view, inventories, merge_groups(acks))
    except NoLiveCopy as error:
        raise OracleViolation(f"5: {error}") from error
    inventory = truth.inventory(member)
    kept = kept_names(view.world_size, inventories, rollback)
    for copies in inventory.copies:
        inventory = with_copies(inventory, copies.rank, own=kept & {*copies.own}, held=kept & {*copies.held})
    for rank in view.ranks_of_slot(view.slots.index(member)):
        if plans:
            _check_sources(truth, plans[rank].unique_from, rank, rollback)
            for _, source_rank, source in plans[rank].replicated_from:
                if (
                    source not in truth.dead
                    and rollback not in copies_of(truth.inventory(source), source_rank).own
                ):
                    raise OracleViolation(f"5: {source} was to give replicated bytes it does not have")
            has = plans[rank].unique_from is not None or rollback in copies_of(inventory, rank).own
            if not has:
                raise OracleViolation(f"5: rank {rank} neither has nor fetches {rollback}")
        elif view.source is not Source.CHECKPOINT:
            raise OracleViolation(f"5: no plan for rank {rank}")
        copies = copies_of(inventory, rank)
        other = sorted(set(copies.own) - {rollback})[-1:]  # it stays in the other bank
        inventory = with_copies(inventory, rank, own={rollback, *other}, held=copies.held)
    return truth.with_inventory(inventory)


def _check_sources(truth: Truth, source: MemberId | None, rank: int, rollback: Name) -> None:
    if source is None or source in truth.dead:
        return
    copies = copies_of(truth.inventory(source), rank)
    if rollback not in (*copies.own, *copies.held):
        raise OracleViolation(f"5: rank {rank} was to fetch {rollback} from {source}, which lacks it")


def _placed(truth: Truth, view: View, slot: int, names: tuple[Name, ...]) -> Truth:
    """`names` complete for all ranks of `slot`, on owner and holders, and nothing else of them."""
    for rank in view.ranks_of_slot(slot):
        truth = truth.with_inventory(with_copies(truth.inventory(view.slots[slot]), rank, own=names))
        for holder in view.holders[slot]:
            member = view.slots[holder]
            if member not in truth.dead:
                truth = truth.with_inventory(with_copies(truth.inventory(member), rank, held=names))
    return truth


def commit(world: World, name: Name) -> World:
    """All ranks capture and replicate `name` and the leader hears of it."""
    view = world.state.view
    assert view is not None
    truth = world.truth
    keep = truth.protected
    names = (name,) if keep is None else (keep, name)
    for slot in range(len(view.slots)):
        truth = _placed(truth, view, slot, names)
    return world._replace(truth=replace(truth, protected=name, lost_since=0))


def capture_one(world: World, name: Name) -> World:
    """Only rank 0 gets `name` complete, in its own bank."""
    view = world.state.view
    assert view is not None
    owner = view.slots[0]
    copies = copies_of(world.truth.inventory(owner), 0)
    keep = [n for n in copies.own if n == world.truth.protected]
    inventory = with_copies(world.truth.inventory(owner), 0, own=(*keep, name), held=copies.held)
    return world._replace(truth=world.truth.with_inventory(inventory))


def kill(world: World, member: MemberId) -> World:
    """The host is gone; nobody knows yet."""
    return world._replace(truth=world.truth.with_death(member), kills=world.kills - 1)


def report_fault(world: World, kind: FaultKind, member: MemberId) -> World:
    """A fault of the first rank of `member`, reported at the step it happened in."""
    view = world.state.view
    assert view is not None
    slot = view.slots.index(member)
    fault = Fault(
        kind=kind,
        member=member,
        generation=view.generation,
        ranks=(slot * view.nproc,),
        step=world.step + 1,
        detail="ValueError: bad" if kind is FaultKind.USER_ERROR else "",
    )
    truth = world.truth
    if kind is not FaultKind.COLLECTIVE:
        truth = replace(truth, replaceable=truth.replaceable | {member})
    if kind is FaultKind.SPARE_FAILED and member not in view.joining:
        return world._replace(faults=world.faults - 1)
    return feed(world._replace(truth=truth, faults=world.faults - 1), FaultReported(fault=fault, now_s=0.0))


def pass_deadline(world: World) -> World:
    """Nothing more is heard until the phase's deadline; who has not acked by then may be replaced."""
    view = world.state.view
    deadline_s = world.state.deadline_s
    assert view is not None and deadline_s is not None
    silent = {m for slot, m in enumerate(view.slots) if m and not world.state.acked >> slot & 1}
    silent |= {m for index, m in enumerate(view.leaving) if not world.state.acked_leaving >> index & 1}
    truth = replace(world.truth, replaceable=world.truth.replaceable | silent)
    world = world._replace(truth=truth, deadlines=world.deadlines - 1)
    return feed(world, Tick(now_s=deadline_s))


def elect(world: World) -> World:
    """A new leader with nothing but what the store says: the View, the members, the acks."""
    old = world.state
    view = old.view
    assert view is not None
    members = tuple(member for member in old.members if member.id not in world.truth.dead)
    fresh = initial_state(old.limits, old.n_slots, old.nproc)
    world = world._replace(state=fresh, elections=world.elections - 1)
    event = LeaderElected(
        view=view,
        members=members,
        now_s=0.0,
        quarantined=tuple(sorted(old.quarantined)),
        checkpoint=old.checkpoint,
    )
    state, effects = step(fresh, event)
    world = world._replace(state=state)
    if effects:
        raise OracleViolation(f"2: a new leader acts before it has heard anything: {effects}")
    for ack in sorted(world.truth.acks, key=str):
        world = feed(world, Acked(ack=ack, now_s=0.0))
    return world


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a search."""

    states: int
    phases: frozenset[Phase]
    violation: str = ""
    path: tuple[str, ...] = ()


def search(setup: Setup, *, max_states: int = 1_000_000, limits: Limits | None = None) -> Verdict:
    """Visit every reachable world, breadth first, until a violation."""
    try:
        start = initial_world(setup, limits)
    except OracleViolation as error:
        return Verdict(states=0, phases=frozenset(), violation=str(error))
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    frontier = [start]
    phases: set[Phase] = set()
    views: set[View] = set()
    label = ""
    while frontier and len(came_from) <= max_states:
        following: list[World] = []
        for world in frontier:
            assert world.state.view is not None
            phases.add(world.state.view.phase)
            try:
                if world.state.view not in views:
                    views.add(world.state.view)
                    check_stale(world.state)
                for label, after in moves(world, setup):
                    seen = len(came_from)
                    came_from.setdefault(after, (world, label))
                    if len(came_from) > seen:
                        following.append(after)
            except OracleViolation as error:
                return Verdict(
                    states=len(came_from),
                    phases=frozenset(phases),
                    violation=str(error),
                    path=(*_path(came_from, world), f"after {label or 'nothing'}"),
                )
        frontier = following
    return Verdict(states=len(came_from), phases=frozenset(phases))


def check_bounded(world: World) -> None:
    """Invariant 7: if nobody ever answers again, deadlines alone bring the job to its end."""
    limit = 10 + 4 * len(world.state.members)  # every silent spare is given its chance
    for _ in range(limit):
        view = world.state.view
        assert view is not None
        if view.phase in (Phase.RUNNING, Phase.FINISHED, Phase.HALTED):
            return
        world = pass_deadline(world)
    raise OracleViolation(f"7: still {world.state.view} after {limit} deadlines")


def _path(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    labels: list[str] = []
    came = came_from[world]
    while came is not None:
        labels.append(came[1])
        came = came_from[came[0]]
    return tuple(reversed(labels))
