"""Named capture: messages, bank rules and the leader's machine. Pure. The follower's machine is in follow.py.

The leader NAMES a step before it is reached. Every rank captures it into the bank that does not hold the
committed name, its agent streams it to the holder, and reports HELD; a rank that cannot reports REFUSED, and
that is final. HELD from all: committed. One step is in flight at a time, so that the two banks of every rank
hold, at every instant, the committed name and at most one other.

[Note: why these rules]
Each looks like a detail and loses every copy when left out; tests/property/test_mutants.py shows how.
- "My other bank is free" is false: ranks learn of a commit at different times. Only the committed name that
  the naming itself carries says which bank must stay.
- A local ack frees nothing: my copy of step n is safe, but a rank that lacks n needs mine of step n - 1.
- Without refusals one rank that hears too late would block all commits for ever.
- Two leaders at once (the old one does not know yet) commit different steps. Hence the term: an agent obeys
  the highest that it heard, and its answer to the new leader's question is the promise. What the old one had
  named counts as refused, unless it is complete everywhere in those answers.
- After a recovery bank numbers differ between owner and holder: the holder chooses by name.
- A stream that still reads a bank about to be overwritten would deliver a torn copy: it is stopped first.
- After a recovery nothing is committed until the rollback step is complete on every owner and holder.

[Note: repeats] Messages may be lost, doubled, late and out of order. Only the leader has a timer: it repeats
its question or its naming to the ranks that have not answered, and a follower answers every repeat again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from deadpool.core import bitset
from deadpool.core.types import Name

REPEAT_S = 0.5
"""A question or naming is repeated this often until answered: a lost connection costs that much."""

MAX_LEAD_STEPS = 64
"""Largest distance at which a step is named ahead of the newest boundary heard of."""

COMMITS_PER_SHRINK = 8
"""Commits in a row after which a smaller lead is tried."""

REFUSED_PAUSE_S = 0.05
"""Pause between namings refused by ranks that did not pass them, such as finished ones, which refuse all."""


# --- Messages between agents ---


@dataclass(frozen=True, slots=True, kw_only=True)
class BanksRequest:
    """Leader -> every agent: what do your ranks have? The answer is the promise to obey no lower term."""

    generation: int
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BanksReport:
    """Owner's agent -> leader: what one rank has.

    `held` is what the OWNER's agent knows its holder to have complete (from the holder's acks). Holders asked
    on their own would answer at another instant, and the two answers could have no name in common.
    """

    generation: int
    term: int
    rank: int
    own: tuple[Name, ...]  # complete in own banks
    held: tuple[Name, ...]  # complete on the rank's holder (every holder, if there are several)
    at_step: int  # newest boundary of the rank that its agent knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Leader -> every agent: capture `step`, and keep the bank that holds `committed`."""

    generation: int
    term: int  # create revision of the leadership key
    step: int
    committed: Name | None


class ReportKind(Enum):
    """Answer to a naming."""

    HELD = "held"  # complete and checksummed on owner and holder
    REFUSED = "refused"  # heard too late, or could not be completed; final


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Owner's agent -> leader: one rank's final answer to the naming of `step`."""

    generation: int
    term: int
    rank: int
    kind: ReportKind
    step: int
    at_step: int  # newest boundary of the rank that its agent knows


# --- Which bank: pure rules, also used by the store ---


def choose_own_bank(banks: Sequence[Name | None], keep: Name | None) -> int | None:
    """The own bank that a new capture overwrites: the one that does not hold `keep`.

    Args:
        banks: per bank the name that is COMPLETE in it, None if EMPTY or WRITING.
        keep: committed name carried by the naming; None only before the first snapshot exists.

    Returns:
        Bank number; None if `keep` is in no bank, so that nothing here says what is safe to lose: refuse.
    """
    if keep is None:
        return 0 if banks[0] is None else 1 if banks[1] is None else None
    if keep not in banks:
        return None
    return 1 - banks.index(keep)


def choose_holder_bank(
    banks: Sequence[Name | None], incoming: Name, keep: Name | None, rollback: Name | None
) -> int | None:
    """The bank in which a holder receives `incoming`, chosen by name: bank numbers of the owner mean nothing.

    Args:
        banks: per bank of that rank the name that is COMPLETE in it here, None if EMPTY or WRITING.
        incoming: name of the arriving copy. If it is already complete here there is nothing to receive:
            acknowledge it at once instead of calling this.
        keep: committed name in the stream's header; None while nothing is committed in this generation.
        rollback: name that the generation resumed from (in FORMING: the name of snapshot 0).

    Returns:
        Bank number; None to refuse the stream: it would cost a copy that may still be needed, or it is older
        than what is here.
    """
    if incoming in banks:
        return None
    complete = [name for name in banks if name is not None]
    if incoming != rollback:
        if keep is None:
            return None  # the rollback step is sent first
        if any(name.step > incoming.step for name in complete):
            return None  # late stream of a step that was given up
    if len(complete) < 2:
        return 0 if banks[0] is None else 1  # never over the only complete copy
    needed = keep if keep is not None else rollback
    if needed in banks:
        return 1 - list(banks).index(needed)
    return min(range(2), key=lambda bank: complete[bank])


# --- The leader ---


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadState:
    """What the leader knows. Frozen and hashable; rank sets are bitsets."""

    generation: int
    term: int
    world_size: int
    rollback: Name
    committed: Name | None = None  # None: nothing is known to survive a loss; no step is named
    answered: int = 0  # ranks whose BanksReport of this term came
    copies: tuple[tuple[Name, int], ...] = ()  # name -> ranks that have it on owner and holder, as answered
    step: int = 0  # newest step named
    held: int = 0  # ranks that hold `step`
    refused: int = 0  # ranks that refused `step`; never taken back
    at_step: int = 0  # newest boundary heard of
    lead_steps: int = 1  # grows with refusals, shrinks with commits
    commits: int = 0  # in a row
    repeat_at_s: float = 0.0
    pause_until_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadTick:
    """Time passes. Send one every REPEAT_S / 2, and after a refusal: the next naming waits for it."""

    now_s: float


LeadEvent = BanksReport | Report | LeadTick


@dataclass(frozen=True, slots=True, kw_only=True)
class AskBanks:
    """Effect: send `request` to the agents of `ranks`."""

    request: BanksRequest
    ranks: int  # bitset


@dataclass(frozen=True, slots=True, kw_only=True)
class SendNaming:
    """Effect: send `naming` to the agents of `ranks`."""

    naming: Naming
    ranks: int  # bitset


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Effect: every rank is protected up to `name`: it is complete on owner and holder of each."""

    name: Name


LeadEffect = AskBanks | SendNaming | Committed


def start_lead(
    *, generation: int, term: int, world_size: int, rollback: Name, now_s: float
) -> tuple[LeadState, tuple[LeadEffect, ...]]:
    """Begin to lead a generation: when RUNNING was published, or when elected while RUNNING.

    Nothing is committed yet; every agent is asked for its banks.

    Args:
        generation: of the RUNNING view.
        term: create revision of the own leadership key.
        world_size: logical ranks.
        rollback: `View.rollback`, the name that the generation resumed from.
        now_s: any monotonic clock, the same as in LeadTick.
    """
    state = LeadState(
        generation=generation,
        term=term,
        world_size=world_size,
        rollback=rollback,
        step=rollback.step,
        at_step=rollback.step,
        repeat_at_s=now_s + REPEAT_S,
    )
    return state, (_ask(state, bitset.full(world_size)),)


def lead(state: LeadState, event: LeadEvent) -> tuple[LeadState, tuple[LeadEffect, ...]]:
    """Advance the leader's side by one message or tick. Pure and total; stale messages change nothing."""
    match event:
        case BanksReport():
            return _on_banks(state, event)
        case Report():
            return _on_report(state, event)
        case LeadTick():
            return _on_lead_tick(state, event.now_s)
    assert_never(event)


def _ask(state: LeadState, ranks: int) -> AskBanks:
    return AskBanks(request=BanksRequest(generation=state.generation, term=state.term), ranks=ranks)


def _on_banks(state: LeadState, report: BanksReport) -> tuple[LeadState, tuple[LeadEffect, ...]]:
    if not _is_current(state, report):
        return state, ()
    state = replace(state, at_step=max(state.at_step, report.at_step))
    if state.committed is not None:
        return state, ()
    bit = 1 << report.rank
    copies = {name: ranks & ~bit for name, ranks in state.copies}
    for name in set(report.own) & set(report.held):
        copies[name] = copies.get(name, 0) | bit
    known = tuple(sorted((name, ranks) for name, ranks in copies.items() if ranks))
    state = replace(state, copies=known, answered=state.answered | bit)
    everyone = bitset.full(state.world_size)
    if state.answered != everyone:
        return state, ()
    common = max((name for name, ranks in known if ranks == everyone), default=None)
    if common is None or common < state.rollback:
        return state, ()  # protection of the rollback step is still under way: asked again at the next repeat
    return _commit(replace(state, copies=()), common)


def _on_report(state: LeadState, report: Report) -> tuple[LeadState, tuple[LeadEffect, ...]]:
    if not _is_current(state, report):
        return state, ()
    state = replace(state, at_step=max(state.at_step, report.at_step))
    if report.step != state.step or state.committed is None:
        return state, ()
    bit = 1 << report.rank
    match report.kind:
        case ReportKind.HELD:
            state = replace(state, held=state.held | bit)
            if state.held == bitset.full(state.world_size) and not state.refused:
                return _commit(_note_commit(state), Name(step=state.step, generation=state.generation))
        case ReportKind.REFUSED:
            if not state.refused:
                state = replace(state, lead_steps=min(MAX_LEAD_STEPS, state.lead_steps + 1), commits=0)
            state = replace(state, refused=state.refused | bit)
    return state, ()


def _on_lead_tick(state: LeadState, now_s: float) -> tuple[LeadState, tuple[LeadEffect, ...]]:
    if state.refused:
        if state.at_step < state.step and now_s < state.pause_until_s:
            return state, ()
        state, effects = _name_next(state)
        return replace(state, repeat_at_s=now_s + REPEAT_S, pause_until_s=now_s + REFUSED_PAUSE_S), effects
    if now_s < state.repeat_at_s:
        return state, ()
    state = replace(state, repeat_at_s=now_s + REPEAT_S)
    everyone = bitset.full(state.world_size)
    if state.committed is None:
        protected = dict(state.copies).get(state.rollback, 0)
        return state, (_ask(state, everyone & ~(state.answered & protected) or everyone),)
    return state, (SendNaming(naming=_naming(state), ranks=everyone & ~state.held),)


def _note_commit(state: LeadState) -> LeadState:
    if state.commits + 1 < COMMITS_PER_SHRINK:
        return replace(state, commits=state.commits + 1)
    return replace(state, commits=0, lead_steps=max(1, state.lead_steps - 1))


def _commit(state: LeadState, name: Name) -> tuple[LeadState, tuple[LeadEffect, ...]]:
    state, effects = _name_next(replace(state, committed=name, step=max(state.step, name.step)))
    return state, (Committed(name=name), *effects)


def _name_next(state: LeadState) -> tuple[LeadState, tuple[LeadEffect, ...]]:
    step = max(state.at_step + state.lead_steps, state.step + 1)
    state = replace(state, step=step, held=0, refused=0)
    return state, (SendNaming(naming=_naming(state), ranks=bitset.full(state.world_size)),)


def _naming(state: LeadState) -> Naming:
    return Naming(generation=state.generation, term=state.term, step=state.step, committed=state.committed)


def _is_current(state: LeadState, message: BanksReport | Report) -> bool:
    return (
        message.generation == state.generation
        and message.term == state.term
        and 0 <= message.rank < state.world_size
    )
