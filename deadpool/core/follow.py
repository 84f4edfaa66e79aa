"""The follower of named capture: one agent, all its ranks. Pure. Rules and messages are in commit.py.

`follow` says which bank the worker captures into, what is streamed to the holder when, and what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from deadpool.core.commit import BanksReport, BanksRequest, Naming, Report, ReportKind, choose_own_bank
from deadpool.core.types import Name

Banks = tuple[Name | None, Name | None]
"""What is COMPLETE in bank 0 and bank 1; None for EMPTY and WRITING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBanks:
    """What one rank has when its generation starts to run, read from the stores."""

    rank: int
    own: Banks  # complete in own bank 0 and 1
    held: tuple[Name, ...] = ()  # known to be complete on every holder; () if unknown: it is sent again


class Answer(Enum):
    """Where one rank stands with the current naming."""

    NONE = "none"  # nothing passed to the worker
    PASSED = "passed"  # the worker was told; it has not captured yet
    CAPTURED = "captured"  # complete in the own bank, not yet on the holder
    HELD = "held"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What the agent knows of one of its ranks."""

    rank: int
    at_step: int
    own: Banks  # None as soon as the worker may overwrite the bank
    held: tuple[Name, ...]
    answer: Answer = Answer.NONE
    bank: int = 0  # that the current naming overwrites
    stream: Name | None = None  # being sent to the holder, from `stream_bank`
    stream_bank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowState:
    """What one agent knows. Frozen and hashable."""

    generation: int
    term: int  # highest heard: the promise
    rollback: Name
    ranks: tuple[RankState, ...]
    naming: Naming | None = None  # newest one obeyed
    committed: Name | None = None  # newest one heard of in this generation
    retired: tuple[int, ...] = ()  # ranks held here although the placement gives them to others now


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPassed:
    """The worker of `rank` finished `step`. Optional, feed it when known (just before a Naming is best)."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The worker's copy of `step` into `bank` is complete and checksummed, and was not frozen meanwhile."""

    rank: int
    step: int
    bank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRefused:
    """The worker heard of `step` after its boundary, or its copy failed or was cancelled (bank is EMPTY)."""

    rank: int
    step: int
    at_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderAcked:
    """Every holder of `rank` has `name` complete, checksum verified."""

    rank: int
    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFailed:
    """`name` could not be delivered: refused, or past its deadline after one reconnect and resend."""

    rank: int
    name: Name


RankEvent = BoundaryPassed | Captured | CaptureRefused | HolderAcked | ReplicationFailed
FollowEvent = BanksRequest | Naming | RankEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStream:
    """Effect: stop sending from `bank` of `rank` and wait until nothing reads it.

    Carry it out BEFORE the PassNaming behind it. The holder never completes what it has of it.
    """

    rank: int
    bank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNaming:
    """Effect: tell the worker of `rank` to capture `step` into `bank`. It replaces what it was told."""

    rank: int
    step: int
    bank: int
    committed: Name | None  # for status and for inputs that need be kept only since then


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Effect: tell the worker of `rank` not to capture `step`, if it has not begun. May be heard too late."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """Effect: send own `bank` (holding `name`) to the holders of `rank`, `keep` goes into the header."""

    rank: int
    name: Name
    bank: int
    keep: Name | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Effect: send `report` to the leader's agent. Once is enough: the leader asks again."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBanks:
    """Effect: send `report` to the leader's agent. Once is enough: the leader asks again."""

    report: BanksReport


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyHeld:
    """Effect: empty all copies held here of `rank`: its new holders have a committed one."""

    rank: int


FollowEffect = StopStream | PassNaming | Withdraw | Replicate | SendReport | SendBanks | EmptyHeld


def start_follow(
    *,
    generation: int,
    rollback: Name,
    ranks: Sequence[RankBanks],
    retired: Sequence[int] = (),
    term: int = 0,
) -> tuple[FollowState, tuple[FollowEffect, ...]]:
    """Begin to follow in a generation: when its RUNNING view is seen. Drop the state at the next ABORTING.

    Sends the rollback step to holders that are not known to have it, before anything else.

    Args:
        generation: of the RUNNING view.
        rollback: `View.rollback`.
        ranks: own ranks; after a restore each has `rollback` in one own bank.
        retired: ranks with copies held here that `View.holders` gives to other hosts now. They are kept until
            something is committed in this generation.
        term: highest term heard in the generation before, 0 at first.
    """
    states = tuple(
        RankState(rank=banks.rank, at_step=rollback.step, own=banks.own, held=banks.held) for banks in ranks
    )
    state = FollowState(
        generation=generation, term=term, rollback=rollback, ranks=states, retired=tuple(retired)
    )
    return _protect_rollback(state)


def follow(state: FollowState, event: FollowEvent) -> tuple[FollowState, tuple[FollowEffect, ...]]:
    """Advance one agent's side by one message or happening. Pure and total; stale ones change nothing."""
    match event:
        case BanksRequest():
            return _on_request(state, event)
        case Naming():
            return _on_naming(state, event)
        case _:
            for index, before in enumerate(state.ranks):
                if before.rank == event.rank:
                    after, effects = _take_rank_event(state, before, event)
                    ranks = (*state.ranks[:index], after, *state.ranks[index + 1 :])
                    return replace(state, ranks=ranks), effects
            return state, ()


_Outcome = tuple[RankState, tuple[FollowEffect, ...]]


def _on_request(state: FollowState, request: BanksRequest) -> tuple[FollowState, tuple[FollowEffect, ...]]:
    if request.generation != state.generation or request.term < state.term:
        return state, ()
    state, effects = _promise(state, request.term)
    state, streams = _protect_rollback(state)
    return state, (*effects, *streams, *(_send_banks(state, rank) for rank in state.ranks))


def _on_naming(state: FollowState, naming: Naming) -> tuple[FollowState, tuple[FollowEffect, ...]]:
    if naming.generation != state.generation or naming.term < state.term:
        return state, ()
    state, withdrawn = _promise(state, naming.term)
    if state.naming is not None and naming.step < state.naming.step:
        return state, withdrawn
    effects: list[FollowEffect] = list(withdrawn)
    if state.naming is not None and naming.step == state.naming.step:
        answered = (rank for rank in state.ranks if rank.answer in (Answer.HELD, Answer.REFUSED))
        return state, (*effects, *(_send_report(state, rank) for rank in answered))
    state = replace(state, naming=naming, committed=naming.committed)
    if naming.committed is not None:
        effects.extend(EmptyHeld(rank=rank) for rank in state.retired)
        state = replace(state, retired=())
    ranks = []
    for rank in state.ranks:
        rank, passed = _pass_naming(rank, naming)
        if rank.answer is Answer.REFUSED:
            passed = (_send_report(state, rank),)
        ranks.append(rank)
        effects.extend(passed)
    return replace(state, ranks=tuple(ranks)), tuple(effects)


def _pass_naming(rank: RankState, naming: Naming) -> _Outcome:
    bank = choose_own_bank(rank.own, naming.committed)
    if naming.step <= rank.at_step or bank is None:
        return replace(rank, answer=Answer.REFUSED), ()
    effects: list[FollowEffect] = []
    if rank.stream is not None and rank.stream_bank == bank:
        effects.append(StopStream(rank=rank.rank, bank=bank))
        rank = replace(rank, stream=None)
    effects.append(PassNaming(rank=rank.rank, step=naming.step, bank=bank, committed=naming.committed))
    own = _with_bank(rank.own, bank, None)
    return replace(rank, own=own, bank=bank, answer=Answer.PASSED), tuple(effects)


def _promise(state: FollowState, term: int) -> tuple[FollowState, tuple[FollowEffect, ...]]:
    """Obey `term` from now on: what an older leader named and is not yet answered, is dropped."""
    if term <= state.term or state.naming is None:
        return replace(state, term=max(term, state.term)), ()
    step = state.naming.step
    passed = tuple(rank.rank for rank in state.ranks if rank.answer is Answer.PASSED)
    ranks = tuple(replace(rank, answer=Answer.NONE) for rank in state.ranks)
    state = replace(state, term=term, naming=None, ranks=ranks)
    return state, tuple(Withdraw(rank=rank, step=step) for rank in passed)


def _protect_rollback(state: FollowState) -> tuple[FollowState, tuple[FollowEffect, ...]]:
    if state.committed is not None:
        return state, ()
    ranks: list[RankState] = []
    effects: list[FollowEffect] = []
    for rank in state.ranks:
        if state.rollback in rank.own and state.rollback not in rank.held and rank.stream is None:
            rank, started = _start_stream(rank, rank.own.index(state.rollback), None, state.rollback)
            effects.extend(started)
        ranks.append(rank)
    return replace(state, ranks=tuple(ranks)), tuple(effects)


def _start_stream(rank: RankState, bank: int, keep: Name | None, rollback: Name) -> _Outcome:
    name = rank.own[bank]
    assert name is not None
    needed = rollback if keep is None else keep
    held = tuple(n for n in rank.held if n == needed)  # the holder may overwrite everything else from now on
    rank = replace(rank, held=held, stream=name, stream_bank=bank)
    return rank, (Replicate(rank=rank.rank, name=name, bank=bank, keep=keep),)


def _take_rank_event(state: FollowState, rank: RankState, event: RankEvent) -> _Outcome:
    match event:
        case BoundaryPassed():
            return replace(rank, at_step=max(rank.at_step, event.step)), ()
        case Captured():
            return _take_capture(state, rank, event)
        case CaptureRefused():
            rank = replace(rank, at_step=max(rank.at_step, event.at_step))
            return _refuse(state, rank) if _awaits(state, rank, Answer.PASSED, event.step) else (rank, ())
        case HolderAcked():
            return _take_ack(state, rank, event.name)
        case ReplicationFailed():
            if rank.stream != event.name:
                return rank, ()
            rank = replace(rank, stream=None)
            is_named = event.name.generation == state.generation
            waits = is_named and _awaits(state, rank, Answer.CAPTURED, event.name.step)
            return _refuse(state, rank) if waits else (rank, ())
    assert_never(event)


def _take_capture(state: FollowState, rank: RankState, event: Captured) -> _Outcome:
    rank = replace(rank, at_step=max(rank.at_step, event.step))
    name = Name(step=event.step, generation=state.generation)
    if state.naming is not None and _awaits(state, rank, Answer.PASSED, event.step):
        rank = replace(rank, own=_with_bank(rank.own, event.bank, name), answer=Answer.CAPTURED)
        return _start_stream(rank, event.bank, state.naming.committed, state.rollback)
    if rank.answer is Answer.PASSED and rank.bank == event.bank:
        return rank, ()  # of a naming since replaced; the worker overwrites this bank next
    return replace(rank, own=_with_bank(rank.own, event.bank, name)), ()


def _take_ack(state: FollowState, rank: RankState, name: Name) -> _Outcome:
    if rank.stream != name:
        return rank, ()  # a stream that was stopped counts for nothing
    rank = replace(rank, stream=None, held=(*(n for n in rank.held if n != name), name))
    if name.generation == state.generation and _awaits(state, rank, Answer.CAPTURED, name.step):
        rank = replace(rank, answer=Answer.HELD)
        return rank, (_send_report(state, rank),)
    if state.naming is None and state.term:
        return rank, (_send_banks(state, rank),)  # the leader waits for this; it would ask again only later
    return rank, ()


def _refuse(state: FollowState, rank: RankState) -> _Outcome:
    rank = replace(rank, answer=Answer.REFUSED)
    return rank, (_send_report(state, rank),)


def _awaits(state: FollowState, rank: RankState, answer: Answer, step: int) -> bool:
    return state.naming is not None and state.naming.step == step and rank.answer is answer


def _send_report(state: FollowState, rank: RankState) -> SendReport:
    assert state.naming is not None
    return SendReport(
        report=Report(
            generation=state.generation,
            term=state.term,
            rank=rank.rank,
            kind=ReportKind.HELD if rank.answer is Answer.HELD else ReportKind.REFUSED,
            step=state.naming.step,
            at_step=rank.at_step,
        )
    )


def _send_banks(state: FollowState, rank: RankState) -> SendBanks:
    return SendBanks(
        report=BanksReport(
            generation=state.generation,
            term=state.term,
            rank=rank.rank,
            own=tuple(name for name in rank.own if name is not None),
            held=rank.held,
            at_step=rank.at_step,
        )
    )


def _with_bank(own: Banks, bank: int, name: Name | None) -> Banks:
    return (name, own[1]) if bank == 0 else (own[0], name)
