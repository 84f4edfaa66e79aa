"""A small world around `commit` and `follow`, to be searched exhaustively: banks, streams, network, kills.

The machines of the core run unchanged in it; nothing of their rules is repeated here. What the world adds is
what can go wrong: a rank is a step ahead, a message is late, two agents lead at once, a host dies in the
middle of a copy, a copy is overwritten while it is being sent. One rank per host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from deadpool.core.commit import (
    AskBanks,
    BanksReport,
    BanksRequest,
    LeadEffect,
    LeadEvent,
    LeadState,
    LeadTick,
    Naming,
    Report,
    SendNaming,
    choose_holder_bank,
    lead,
    start_lead,
)
from deadpool.core.follow import (
    Captured,
    CaptureRefused,
    EmptyHeld,
    FollowEffect,
    FollowEvent,
    FollowState,
    HolderAcked,
    PassNaming,
    RankBanks,
    Replicate,
    ReplicationFailed,
    SendBanks,
    SendReport,
    StopStream,
    Withdraw,
    follow,
    start_follow,
)
from deadpool.core.plan import kept_names
from deadpool.core.types import Name
from deadpool.testing.banks import (
    EMPTY,
    Bank,
    Banks,
    Disks,
    complete_names,
    inventories_of,
    name_in,
    put,
    survivors_of,
)

_T = TypeVar("_T", FollowState, LeadState)


class Fixed(Generic[_T]):
    """A machine's state of which there is one object per value: cheap to hash and to compare.

    Searching is mostly asking whether a world was seen before, and the machines' states are its largest part.
    """

    __slots__ = ("value",)

    def __init__(self, value: _T) -> None:
        self.value: _T = value


@lru_cache(maxsize=500_000)
def _fixed_agent(state: FollowState) -> Fixed[FollowState]:
    return Fixed(state)


@lru_cache(maxsize=500_000)
def _fixed_leader(state: LeadState) -> Fixed[LeadState]:
    return Fixed(state)


@lru_cache(maxsize=500_000)
def _followed(
    agent: Fixed[FollowState], event: FollowEvent
) -> tuple[Fixed[FollowState], tuple[FollowEffect, ...]]:
    state, effects = follow(agent.value, event)
    return _fixed_agent(state), effects


@lru_cache(maxsize=500_000)
def _led(leader: Fixed[LeadState], event: LeadEvent) -> tuple[Fixed[LeadState], tuple[LeadEffect, ...]]:
    state, effects = lead(leader.value, event)
    return _fixed_leader(_timeless(state)), effects


def _timeless(state: LeadState) -> LeadState:
    """The clock stands at 0, and every pause is over: a tick may come at any time."""
    return replace(state, repeat_at_s=0.0, pause_until_s=0.0)


class Stream(NamedTuple):
    """A copy under way from owner to holder."""

    name: Name
    bank: int  # of the owner
    keep: Name | None
    target: int  # bank of the holder; -1 until it has begun
    is_torn: bool  # the owner's bank was overwritten meanwhile


class Rank(NamedTuple):
    """One host with one rank: its worker, its banks, and its copy on its holder's host."""

    step: int
    own: Banks
    hold: Banks
    retired: Banks | None  # copy on the host that held it before
    told: tuple[int, int] | None  # (step, bank) that the worker is to capture
    stream: Stream | None
    agent: Fixed[FollowState]


Message = tuple[int, BanksRequest | Naming] | tuple[int, Report | BanksReport]
"""(destination, message); destination -1 is every leader."""


class World(NamedTuple):
    """Everything at one instant."""

    generation: int
    ranks: tuple[Rank, ...]
    leaders: tuple[Fixed[LeadState], ...]
    net: frozenset[Message]
    faults: int  # left to happen: a host dies, or a generation opens without a loss
    failures: int  # left to happen: a capture or a stream fails
    phase: str  # RUN, RESTORE, HALT (state lost), TORN (resumed from a torn copy)
    rollback: Name
    shift: int  # holder of rank r is host r + shift
    is_claim_broken: bool  # the last loss was claimed survivable and was not


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Which world, and what may happen in it."""

    hosts: int = 2
    last_step: int = 3
    faults: int = 0
    failures: int = 0
    elections: bool = False  # a second agent starts to lead while the first does not know
    spurious: bool = False  # a fault may also be a generation without a loss
    reholds: bool = False  # a new generation chooses other holders
    stale: bool = False  # messages of older generations stay in the network; not with `reduced`
    coarse: bool = False  # a capture, and a stream, is one move: for searches that look at other things
    reduced: bool = True  # see `_urgent_delivery`


def initial_world(setup: Setup) -> World:
    """All ranks hold snapshot 0 on owner and holder; one leader asks for banks."""
    rollback = Name(step=0, generation=0)
    zero = (Bank(rollback, "C"), EMPTY)
    ranks = []
    for i in range(setup.hosts):
        banks = RankBanks(rank=i, own=(rollback, None), held=(rollback,))
        agent, _ = start_follow(generation=0, rollback=rollback, ranks=[banks])
        ranks.append(Rank(0, zero, zero, None, None, None, _fixed_agent(agent)))
    world = World(0, tuple(ranks), (), frozenset(), setup.faults, setup.failures, "RUN", rollback, 1, False)
    world = _begin_lead(world, setup, 1)
    while world.leaders[0].value.committed is None:
        _, world = next(iter(_deliveries(world, setup)))  # the first answers are of no interest
    return _elect_another(world, setup)


def survivors(world: World) -> tuple[Name | None, ...]:
    """Per host, the step that all could resume from if it died now; at the end, if nobody did."""
    return survivors_of(_disks(world), world.shift)


def _disks(world: World) -> Disks:
    return tuple([(rank.own, rank.hold, rank.retired) for rank in world.ranks])


def moves(world: World, setup: Setup) -> Iterator[tuple[str, World]]:
    """All that can happen next."""
    if world.phase == "RUN":
        urgent = _urgent_delivery(world, setup) if setup.reduced else None
        if urgent is not None:
            yield urgent
            return
        slowest = min(rank.step for rank in world.ranks)
        for i, rank in enumerate(world.ranks):
            yield from _worker_moves(world, setup, i, rank, slowest)
            if rank.stream is not None:
                yield from _stream_moves(world, setup, i, rank, rank.stream)
        yield from _deliveries(world, setup)
        for index, leader in enumerate(world.leaders):
            if leader.value.refused and leader.value.step < setup.last_step:
                yield f"leader {leader.value.term} ticks", _lead(world, setup, index, LeadTick(now_s=0.0))
    if world.phase == "RESTORE":
        yield from _restore_moves(world, setup)
    if world.phase in ("RUN", "RESTORE") and world.faults:
        for victim in range(-1 if setup.spurious else 0, setup.hosts):
            yield f"host {victim} dies", _open_generation(world, setup, victim)


def _worker_moves(
    world: World, setup: Setup, i: int, rank: Rank, slowest: int
) -> Iterator[tuple[str, World]]:
    writing = [b for b in range(2) if rank.own[b].kind == "W"]
    if not writing and rank.step < setup.last_step and rank.step <= slowest:
        step = rank.step + 1
        after = rank._replace(step=step)
        if rank.told is not None and rank.told[0] == step:
            bank = rank.told[1]
            name = Name(step=step, generation=world.generation)
            after = after._replace(own=put(rank.own, bank, Bank(name, "W")), told=None)
            if rank.stream is not None and rank.stream.bank == bank:
                after = after._replace(stream=rank.stream._replace(is_torn=True))
            if setup.coarse:
                after = after._replace(own=put(rank.own, bank, Bank(name, "C")))
                event = Captured(rank=i, step=step, bank=bank)
                yield f"rank {i} captures {step}", _follow(_with_rank(world, i, after), setup, i, event)
                return
        yield f"rank {i} finishes {step}", _with_rank(world, i, after)
    for bank in writing:
        name_written = rank.own[bank].name
        assert name_written is not None
        step = name_written.step
        done = _with_rank(world, i, rank._replace(own=put(rank.own, bank, Bank(name_written, "C"))))
        yield f"rank {i} captured {step}", _follow(done, setup, i, Captured(rank=i, step=step, bank=bank))
        if world.failures:
            lost = _with_rank(world, i, rank._replace(own=put(rank.own, bank, EMPTY)))
            lost = lost._replace(failures=world.failures - 1)
            refused = CaptureRefused(rank=i, step=step, at_step=rank.step)
            yield f"rank {i} fails to capture {step}", _follow(lost, setup, i, refused)


def _stream_moves(
    world: World, setup: Setup, i: int, rank: Rank, stream: Stream
) -> Iterator[tuple[str, World]]:
    name = stream.name
    acked = HolderAcked(rank=i, name=name)
    if stream.target >= 0:
        kind = "X" if stream.is_torn else "C"
        after = rank._replace(stream=None, hold=put(rank.hold, stream.target, Bank(name, kind)))
        yield f"holder of {i} has {name}", _follow(_with_rank(world, i, after), setup, i, acked)
    else:
        complete = [bank.name if bank.kind in "CX" else None for bank in rank.hold]
        if name in complete:
            after = rank._replace(stream=None)
            yield f"holder of {i} had {name}", _follow(_with_rank(world, i, after), setup, i, acked)
            return
        target = choose_holder_bank(complete, name, stream.keep, world.rollback)
        if target is None:
            yield f"holder of {i} refuses {name}", _fail_stream(world, setup, i, rank, stream)
        elif setup.coarse:
            kind = "X" if stream.is_torn else "C"
            after = rank._replace(stream=None, hold=put(rank.hold, target, Bank(name, kind)))
            yield f"holder of {i} has {name}", _follow(_with_rank(world, i, after), setup, i, acked)
        else:
            after = rank._replace(
                stream=stream._replace(target=target), hold=put(rank.hold, target, Bank(name, "W"))
            )
            yield f"holder of {i} receives {name} in bank {target}", _with_rank(world, i, after)
    if world.failures:
        failing = world._replace(failures=world.failures - 1)
        yield f"stream of {i} fails for {name}", _fail_stream(failing, setup, i, rank, stream)


def _fail_stream(world: World, setup: Setup, i: int, rank: Rank, stream: Stream) -> World:
    hold = rank.hold if stream.target < 0 else put(rank.hold, stream.target, EMPTY)
    after = _with_rank(world, i, rank._replace(stream=None, hold=hold))
    return _follow(after, setup, i, ReplicationFailed(rank=i, name=stream.name))


def _deliveries(world: World, setup: Setup) -> Iterator[tuple[str, World]]:
    for message in sorted(world.net, key=_order):
        to, body = message
        after = world._replace(net=world.net - {message})
        match body:
            case BanksRequest() | Naming():
                after = _follow(after, setup, to, body)
            case Report() | BanksReport():
                for index in range(len(world.leaders)):
                    after = _lead(after, setup, index, body)
        yield f"{to} hears {body}", after


def _urgent_delivery(world: World, setup: Setup) -> tuple[str, World] | None:
    """A delivery that nobody but its receiver can notice: nothing is lost by letting it happen now.

    Ignored messages, and reports that make the leader do nothing yet. What is given up are some orders in
    which two such reports arrive; the random walk of the property tests takes those.
    """
    for message, (label, after) in zip(sorted(world.net, key=_order), _deliveries(world, setup), strict=True):
        sent = after.net - world.net
        if sent or (message[0] >= 0 and after.ranks[message[0]] != world.ranks[message[0]]):
            continue
        if claims(world) == claims(after):
            return label, after
    return None


def _restore_moves(world: World, setup: Setup) -> Iterator[tuple[str, World]]:
    missing = [i for i, rank in enumerate(world.ranks) if world.rollback not in complete_names(rank.own)]
    for i in missing:
        rank = world.ranks[i]
        bank = 0 if rank.own[0].kind == "E" else 1
        kinds = {b.kind for b in (*rank.hold, *(rank.retired or ())) if b.name == world.rollback}
        if kinds == {"X"}:
            yield f"rank {i} fetches a torn copy", world._replace(phase="TORN")
            continue
        own = put(rank.own, bank, Bank(world.rollback, "C"))
        yield f"rank {i} fetches {world.rollback}", _with_rank(world, i, rank._replace(own=own))
    if not missing:
        yield "runs again", _run(world, setup)


def _run(world: World, setup: Setup) -> World:
    term = world.leaders[0].value.term
    running = world._replace(phase="RUN", leaders=())
    old_shift = world.shift - 1 or setup.hosts - 1
    for i, rank in enumerate(world.ranks):
        banks = RankBanks(
            rank=i,
            own=(name_in(rank.own[0]), name_in(rank.own[1])),
            held=tuple(sorted(complete_names(rank.hold))),
        )
        retired = [r for r in range(setup.hosts) if (r + old_shift) % setup.hosts == i]
        retired = [r for r in retired if world.ranks[r].retired is not None]
        agent, effects = start_follow(
            generation=world.generation,
            rollback=world.rollback,
            ranks=[banks],
            retired=retired,
            term=rank.agent.value.term,
        )
        fresh = running.ranks[i]._replace(
            step=world.rollback.step, agent=_fixed_agent(agent), told=None, stream=None
        )
        running = _act(_with_rank(running, i, fresh), setup, i, effects)
    return _elect_another(_begin_lead(running, setup, term), setup)


def _open_generation(world: World, setup: Setup, victim: int) -> World:
    rollback = survivors(world)[victim]
    opened = world._replace(
        generation=world.generation + 1,
        faults=world.faults - 1,
        net=world.net if setup.stale else frozenset(),
    )
    if rollback is None:
        was_claimed = world.phase == "RUN" and victim >= 0 and bool(claims(world))
        return opened._replace(phase="HALT", is_claim_broken=was_claimed)
    kept = kept_names(setup.hosts, inventories_of(_disks(world), world.shift, victim), rollback)
    ranks = []
    hosts = setup.hosts
    rehold = setup.reholds and world.shift == 1
    for i, rank in enumerate(world.ranks):
        own = _cleaned(rank.own, kept, i == victim)
        hold = _cleaned(rank.hold, kept, (i + world.shift) % hosts == victim)
        retired = None
        if rehold:
            retired, hold = hold, (EMPTY, EMPTY)
        elif rank.retired is not None:
            retired = _cleaned(rank.retired, kept, (i + 1) % hosts == victim)
        agent = rank.agent
        ranks.append(Rank(rollback.step, own, hold, retired, None, None, agent))
    shift = 2 if rehold else world.shift
    leaders = (max(world.leaders, key=lambda leader: leader.value.term),)
    return opened._replace(
        ranks=tuple(ranks), leaders=leaders, phase="RESTORE", rollback=rollback, shift=shift
    )


def _begin_lead(world: World, setup: Setup, term: int) -> World:
    leader, effects = start_lead(
        generation=world.generation,
        term=term,
        world_size=len(world.ranks),
        rollback=world.rollback,
        now_s=0.0,
    )
    world = world._replace(leaders=(*world.leaders, _fixed_leader(_timeless(leader))))
    return _send(world, setup, effects)


def _elect_another(world: World, setup: Setup) -> World:
    """A second leader from the start: what it asks may arrive as late as if it were elected later."""
    return _begin_lead(world, setup, world.leaders[0].value.term + 1) if setup.elections else world


def _lead(world: World, setup: Setup, index: int, event: LeadEvent) -> World:
    leader, effects = _led(world.leaders[index], event)
    leaders = (*world.leaders[:index], leader, *world.leaders[index + 1 :])
    return _send(world._replace(leaders=leaders), setup, effects)


def _send(world: World, setup: Setup, effects: tuple[LeadEffect, ...]) -> World:
    messages: set[Message] = set()
    for effect in effects:
        match effect:
            case AskBanks():
                messages |= {(i, effect.request) for i in range(len(world.ranks))}
            case SendNaming() if effect.naming.step <= setup.last_step:
                messages |= {(i, effect.naming) for i in range(len(world.ranks))}
    return world._replace(net=world.net | messages)


def _follow(world: World, setup: Setup, i: int, event: FollowEvent) -> World:
    rank = world.ranks[i]
    agent, effects = _followed(rank.agent, event)
    return _act(_with_rank(world, i, rank._replace(agent=agent)), setup, i, effects)


def _act(world: World, setup: Setup, i: int, effects: tuple[FollowEffect, ...]) -> World:
    for effect in effects:
        rank = world.ranks[i]
        match effect:
            case StopStream():
                if rank.stream is not None and rank.stream.bank == effect.bank:
                    target = rank.stream.target
                    hold = rank.hold if target < 0 else put(rank.hold, target, EMPTY)
                    world = _with_rank(world, i, rank._replace(stream=None, hold=hold))
            case PassNaming():
                if rank.step >= effect.step:
                    late = CaptureRefused(rank=i, step=effect.step, at_step=rank.step)
                    world = _follow(_with_rank(world, i, rank._replace(told=None)), setup, i, late)
                else:
                    world = _with_rank(world, i, rank._replace(told=(effect.step, effect.bank)))
            case Withdraw():
                pass  # the worst case: the worker hears of it too late
            case Replicate():
                stream = Stream(effect.name, effect.bank, effect.keep, -1, False)
                world = _with_rank(world, i, rank._replace(stream=stream))
            case SendReport() | SendBanks():
                world = world._replace(net=world.net | {(-1, effect.report)})
            case EmptyHeld():
                other = world.ranks[effect.rank]
                world = _with_rank(world, effect.rank, other._replace(retired=None))
    return world


def claims(world: World) -> list[Name]:
    """What the leaders call committed."""
    return [leader.value.committed for leader in world.leaders if leader.value.committed is not None]


def _order(message: Message) -> tuple[object, ...]:
    """Any order will do, so long as it is the same in every process."""
    to, body = message
    match body:
        case BanksRequest():
            return to, body.generation, body.term, 0
        case Naming():
            return to, body.generation, body.term, 1, body.step
        case Report():
            return to, body.generation, body.term, 2, body.rank, body.step, body.kind.value
        case BanksReport():
            return to, body.generation, body.term, 3, body.rank, body.at_step, body.own, body.held


def _cleaned(banks: Banks, kept: frozenset[Name], is_gone: bool) -> Banks:
    def clean(bank: Bank) -> Bank:
        return bank if bank.kind in "CX" and bank.name in kept and not is_gone else EMPTY

    return clean(banks[0]), clean(banks[1])


def _with_rank(world: World, i: int, rank: Rank) -> World:
    return world._replace(ranks=(*world.ranks[:i], rank, *world.ranks[i + 1 :]))
