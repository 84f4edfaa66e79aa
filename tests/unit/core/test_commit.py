"""Bank rules and the leader's side of named capture."""

from __future__ import annotations

import pytest

from deadpool.core import bitset
from deadpool.core.commit import (
    COMMITS_PER_SHRINK,
    MAX_LEAD_STEPS,
    REFUSED_PAUSE_S,
    REPEAT_S,
    AskBanks,
    BanksReport,
    Committed,
    LeadEffect,
    LeadState,
    LeadTick,
    Report,
    ReportKind,
    SendNaming,
    choose_holder_bank,
    choose_own_bank,
    lead,
    start_lead,
)
from deadpool.core.types import Name


def name(step: int, generation: int = 1) -> Name:
    return Name(step=step, generation=generation)


ZERO = name(0)


@pytest.mark.parametrize(
    ("banks", "keep", "bank"),
    [
        ((name(3), name(4)), name(3), 1),
        ((name(3), name(4)), name(4), 0),
        ((name(3), None), name(3), 1),
        ((None, None), None, 0),
        ((ZERO, None), None, 1),
        ((name(3), name(4)), name(5), None),  # nothing says what is safe to lose
        ((name(3), name(4)), name(4, generation=2), None),  # the same step of another generation
        ((name(3), name(4)), None, None),
    ],
)
def test_a_capture_overwrites_the_bank_without_the_committed_name(
    banks: tuple[Name | None, Name | None], keep: Name | None, bank: int | None
) -> None:
    assert choose_own_bank(banks, keep) == bank


@pytest.mark.parametrize(
    ("banks", "incoming", "keep", "rollback", "bank"),
    [
        ((None, None), ZERO, None, ZERO, 0),  # snapshot 0
        ((name(3), None), name(4), name(3), ZERO, 1),
        ((None, name(3)), name(4), name(3), ZERO, 0),
        ((name(2), name(3)), name(4), name(3), ZERO, 0),  # by name, whatever the owner's bank
        ((name(3), name(2)), name(4), name(3), ZERO, 1),
        ((name(3), None), name(4), name(2), ZERO, 1),  # never over the only complete copy
        ((name(3), name(4)), name(4), name(3), ZERO, None),  # it is here: acknowledge instead
        ((name(5), name(3)), name(4), name(3), ZERO, None),  # late stream of a step that was given up
        ((name(2), name(3)), name(4), None, name(3), None),  # the rollback step is sent first
        ((name(1), name(2)), name(3), None, name(3), 0),  # protecting the rollback step: the oldest goes
        ((name(4), name(5)), name(3), None, name(3), 0),  # it may be older than what is here
    ],
)
def test_a_holder_receives_where_nothing_needed_is_lost(
    banks: tuple[Name | None, Name | None],
    incoming: Name,
    keep: Name | None,
    rollback: Name,
    bank: int | None,
) -> None:
    assert choose_holder_bank(banks, incoming, keep, rollback) == bank


class Leader:
    """Feeds a leader of two ranks and keeps what it did."""

    def __init__(self, rollback: Name = ZERO, term: int = 7) -> None:
        self.state: LeadState
        self.effects: tuple[LeadEffect, ...]
        self.term = term
        self.state, self.effects = start_lead(
            generation=1, term=term, world_size=2, rollback=rollback, now_s=0.0
        )

    def banks(self, rank: int, *names: Name, at_step: int = 0, term: int | None = None) -> None:
        self.feed(
            BanksReport(
                generation=1, term=term or self.term, rank=rank, own=names, held=names, at_step=at_step
            )
        )

    def report(
        self, rank: int, kind: ReportKind, step: int, *, at_step: int = 0, term: int | None = None
    ) -> None:
        report = Report(
            generation=1, term=term or self.term, rank=rank, kind=kind, step=step, at_step=at_step
        )
        self.feed(report)

    def feed(self, event: BanksReport | Report | LeadTick) -> None:
        self.state, self.effects = lead(self.state, event)

    @property
    def named(self) -> list[int]:
        return [effect.naming.step for effect in self.effects if isinstance(effect, SendNaming)]

    @property
    def committed(self) -> list[Name]:
        return [effect.name for effect in self.effects if isinstance(effect, Committed)]


def ready() -> Leader:
    leader = Leader()
    for rank in (0, 1):
        leader.banks(rank, ZERO)
    return leader


def test_a_leader_first_asks_everybody_for_their_banks() -> None:
    (ask,) = Leader().effects
    assert isinstance(ask, AskBanks)
    assert (ask.ranks, ask.request.term) == (0b11, 7)


def test_the_newest_name_that_all_answered_is_committed_and_the_next_step_named() -> None:
    leader = Leader()
    leader.banks(0, ZERO, name(1), at_step=2)
    assert leader.effects == ()
    leader.banks(1, ZERO)
    assert leader.committed == [ZERO]
    assert leader.named == [3]


def test_a_step_of_which_one_rank_has_no_replica_is_not_committed() -> None:
    leader = Leader()
    leader.banks(0, ZERO, name(1))
    leader.feed(BanksReport(generation=1, term=7, rank=1, own=(ZERO, name(1)), held=(ZERO,), at_step=1))
    assert leader.committed == [ZERO]


def test_nothing_is_committed_until_the_rollback_step_is_protected_everywhere() -> None:
    leader = Leader(rollback=name(5))
    for rank in (0, 1):
        leader.banks(rank, name(4))  # common, but older than what all resumed from
    assert leader.state.committed is None
    leader.banks(0, name(5))
    assert leader.state.committed is None
    leader.banks(1, name(5))
    assert leader.committed == [name(5)]


def test_the_question_is_repeated_to_those_without_an_answer() -> None:
    leader = Leader()
    leader.banks(0, ZERO)
    leader.feed(LeadTick(now_s=REPEAT_S / 2))
    assert not leader.effects
    leader.feed(LeadTick(now_s=REPEAT_S))
    (ask,) = leader.effects
    assert isinstance(ask, AskBanks) and list(bitset.items(ask.ranks)) == [1]


def test_a_naming_carries_generation_term_and_what_to_keep() -> None:
    effects = ready().effects
    naming = next(effect.naming for effect in effects if isinstance(effect, SendNaming))
    assert (naming.generation, naming.term, naming.step, naming.committed) == (1, 7, 1, ZERO)


def test_a_step_is_committed_when_the_last_rank_holds_it() -> None:
    leader = ready()
    leader.report(0, ReportKind.HELD, 1, at_step=1)
    assert leader.effects == ()
    leader.report(1, ReportKind.HELD, 1, at_step=1)
    assert leader.committed == [name(1)]
    assert leader.named == [2]


def test_the_same_report_twice_counts_once() -> None:
    leader = ready()
    for _ in range(2):
        leader.report(0, ReportKind.HELD, 1)
    assert leader.state.committed == ZERO


def test_a_refusal_is_final_and_the_next_step_waits_for_a_tick() -> None:
    leader = ready()
    leader.report(0, ReportKind.REFUSED, 1, at_step=4)
    assert leader.named == []
    leader.report(0, ReportKind.HELD, 1)
    leader.report(1, ReportKind.HELD, 1)
    assert leader.state.committed == ZERO
    leader.feed(LeadTick(now_s=0.01))
    assert leader.named == [6]  # newest boundary 4, lead 2


def test_the_lead_grows_with_refusals_and_shrinks_after_commits_in_a_row() -> None:
    leader = ready()
    for _ in range(MAX_LEAD_STEPS + 5):
        leader.report(0, ReportKind.REFUSED, leader.state.step, at_step=leader.state.step)
        leader.feed(LeadTick(now_s=0.0))
    assert leader.state.lead_steps == MAX_LEAD_STEPS
    for count in range(1, COMMITS_PER_SHRINK + 1):
        assert leader.state.lead_steps == MAX_LEAD_STEPS, f"after {count - 1} commits"
        for rank in (0, 1):
            leader.report(rank, ReportKind.HELD, leader.state.step)
    assert leader.state.lead_steps == MAX_LEAD_STEPS - 1


def test_ranks_that_refuse_everything_do_not_make_the_leader_spin() -> None:
    leader = ready()
    named = 0
    for tick in range(100):  # 10 ms apart; nobody passes a boundary any more
        leader.report(0, ReportKind.REFUSED, leader.state.step)
        leader.feed(LeadTick(now_s=tick * 0.01))
        named += len(leader.named)
    assert named <= 1 / REFUSED_PAUSE_S + 1


def test_a_naming_is_repeated_only_to_ranks_that_do_not_hold_it() -> None:
    leader = ready()
    leader.report(1, ReportKind.HELD, 1)
    leader.feed(LeadTick(now_s=1.0))
    (send,) = leader.effects
    assert isinstance(send, SendNaming) and list(bitset.items(send.ranks)) == [0]


@pytest.mark.parametrize("term", [6, 8])
def test_reports_of_another_term_change_nothing(term: int) -> None:
    leader = ready()
    before = leader.state
    for rank in (0, 1):
        leader.report(rank, ReportKind.HELD, 1, term=term)
        leader.banks(rank, name(9), term=term)
    assert leader.state == before


def test_reports_of_another_generation_or_of_no_rank_change_nothing() -> None:
    leader = ready()
    before = leader.state
    for generation, rank in ((0, 0), (2, 0), (1, 2), (1, -1)):
        leader.feed(Report(generation=generation, term=7, rank=rank, kind=ReportKind.HELD, step=1, at_step=9))
    assert leader.state == before


def test_a_late_report_of_an_earlier_step_only_tells_where_the_rank_is() -> None:
    leader = ready()
    for rank in (0, 1):
        leader.report(rank, ReportKind.HELD, 1)
    leader.report(0, ReportKind.REFUSED, 1, at_step=5)
    assert (leader.state.refused, leader.state.at_step) == (0, 5)
