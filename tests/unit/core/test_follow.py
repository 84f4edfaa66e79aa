"""One agent's side of named capture."""

from __future__ import annotations

import pytest

from deadpool.core.commit import BanksRequest, Naming, ReportKind
from deadpool.core.follow import (
    BoundaryPassed,
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
from deadpool.core.types import Name

ZERO = Name(step=0, generation=1)


def name(step: int) -> Name:
    return Name(step=step, generation=1)


class Agent:
    """Feeds an agent with one rank, 3, and keeps what it did."""

    def __init__(self, *, held: tuple[Name, ...] = (ZERO,), retired: tuple[int, ...] = ()) -> None:
        self.state: FollowState
        self.effects: tuple[FollowEffect, ...]
        banks = RankBanks(rank=3, own=(ZERO, None), held=held)
        self.state, self.effects = start_follow(
            generation=1, rollback=ZERO, ranks=[banks], retired=retired, term=5
        )

    def feed(self, *events: FollowEvent) -> tuple[FollowEffect, ...]:
        for event in events:
            self.state, self.effects = follow(self.state, event)
        return self.effects

    def hear(
        self, step: int, keep: Name | None = ZERO, *, term: int = 5, generation: int = 1
    ) -> tuple[FollowEffect, ...]:
        return self.feed(Naming(generation=generation, term=term, step=step, committed=keep))

    def hold(self, step: int, bank: int) -> tuple[FollowEffect, ...]:
        return self.feed(Captured(rank=3, step=step, bank=bank), HolderAcked(rank=3, name=name(step)))


def answers(effects: tuple[FollowEffect, ...]) -> list[tuple[ReportKind, int, int]]:
    reports = [effect.report for effect in effects if isinstance(effect, SendReport)]
    return [(report.kind, report.step, report.at_step) for report in reports]


def test_the_rollback_step_is_sent_first_to_a_holder_that_lacks_it() -> None:
    assert Agent(held=()).effects == (Replicate(rank=3, name=ZERO, bank=0, keep=None),)
    assert Agent().effects == ()


def test_a_naming_goes_to_the_worker_with_the_bank_that_is_free() -> None:
    agent = Agent()
    assert agent.hear(1) == (PassNaming(rank=3, step=1, bank=1, committed=ZERO),)


def test_a_captured_step_is_sent_with_the_committed_name_in_its_header() -> None:
    agent = Agent()
    agent.hear(1)
    effects = agent.feed(Captured(rank=3, step=1, bank=1))
    assert effects == (Replicate(rank=3, name=name(1), bank=1, keep=ZERO),)


def test_held_is_reported_after_the_holders_ack_and_not_before() -> None:
    agent = Agent()
    agent.hear(1)
    assert answers(agent.feed(Captured(rank=3, step=1, bank=1))) == []
    assert answers(agent.feed(HolderAcked(rank=3, name=name(1)))) == [(ReportKind.HELD, 1, 1)]


def test_a_naming_heard_again_is_answered_again_and_passed_on_once() -> None:
    agent = Agent()
    agent.hear(1)
    assert agent.hear(1) == ()
    agent.hold(1, bank=1)
    before = agent.state
    assert answers(agent.hear(1)) == [(ReportKind.HELD, 1, 1)]
    assert agent.state == before


def test_a_naming_heard_after_the_boundary_is_refused_with_the_ranks_step() -> None:
    agent = Agent()
    agent.feed(BoundaryPassed(rank=3, step=4))
    assert answers(agent.hear(4)) == [(ReportKind.REFUSED, 4, 4)]
    assert answers(agent.hear(4)) == [(ReportKind.REFUSED, 4, 4)]


def test_a_worker_that_heard_too_late_refuses() -> None:
    agent = Agent()
    agent.hear(1)
    refused = CaptureRefused(rank=3, step=1, at_step=2)
    assert answers(agent.feed(refused)) == [(ReportKind.REFUSED, 1, 2)]
    assert agent.feed(refused) == ()


def test_a_copy_that_cannot_be_delivered_is_refused() -> None:
    agent = Agent()
    agent.hear(1)
    agent.feed(Captured(rank=3, step=1, bank=1))
    effects = agent.feed(ReplicationFailed(rank=3, name=name(1)))
    assert answers(effects) == [(ReportKind.REFUSED, 1, 1)]
    assert agent.feed(HolderAcked(rank=3, name=name(1))) == ()  # refused is final


def test_a_naming_is_refused_if_no_bank_holds_the_committed_name() -> None:
    assert answers(Agent().hear(2, keep=name(1))) == [(ReportKind.REFUSED, 2, 0)]


def test_a_stream_that_reads_the_bank_is_stopped_before_the_worker_is_told() -> None:
    agent = Agent()
    agent.hear(1)
    agent.feed(Captured(rank=3, step=1, bank=1))
    effects = agent.hear(2)  # step 1 was refused by another rank
    assert effects == (
        StopStream(rank=3, bank=1),
        PassNaming(rank=3, step=2, bank=1, committed=ZERO),
    )
    assert agent.feed(HolderAcked(rank=3, name=name(1))) == ()
    assert agent.state.ranks[0].held == (ZERO,)


def test_a_committed_step_frees_the_bank_of_the_one_before() -> None:
    agent = Agent()
    agent.hear(1)
    agent.hold(1, bank=1)
    assert agent.hear(2, keep=name(1)) == (PassNaming(rank=3, step=2, bank=0, committed=name(1)),)


def test_an_own_replica_alone_frees_nothing() -> None:
    agent = Agent()
    agent.hear(1)
    agent.hold(1, bank=1)
    assert agent.hear(2, keep=ZERO)[-1] == PassNaming(rank=3, step=2, bank=1, committed=ZERO)


@pytest.mark.parametrize(("term", "generation"), [(4, 1), (5, 0), (5, 2)])
def test_namings_of_a_lower_term_or_another_generation_change_nothing(term: int, generation: int) -> None:
    agent = Agent()
    before = agent.state
    assert agent.hear(1, term=term, generation=generation) == ()
    assert agent.feed(BanksRequest(generation=generation, term=term)) == ()
    assert agent.state == before


def test_an_older_naming_that_arrives_late_changes_nothing() -> None:
    agent = Agent()
    agent.hear(2)
    before = agent.state
    assert agent.hear(1) == ()
    assert agent.state == before


def test_a_new_leader_is_told_the_banks_and_what_the_old_one_named_is_dropped() -> None:
    agent = Agent()
    agent.hear(1)
    withdraw, banks = agent.feed(BanksRequest(generation=1, term=6))
    assert withdraw == Withdraw(rank=3, step=1)
    assert isinstance(banks, SendBanks)
    assert (banks.report.term, banks.report.own, banks.report.held) == (6, (ZERO,), (ZERO,))
    assert agent.hear(2, term=5) == ()


def test_a_step_captured_although_it_was_dropped_is_reported_to_nobody() -> None:
    agent = Agent()
    agent.hear(1)
    agent.feed(BanksRequest(generation=1, term=6))
    assert agent.feed(Captured(rank=3, step=1, bank=1)) == ()
    (banks,) = agent.feed(BanksRequest(generation=1, term=6))
    assert isinstance(banks, SendBanks) and banks.report.own == (ZERO, name(1))


def test_a_stream_that_ends_after_the_change_of_leader_tells_the_new_one() -> None:
    agent = Agent()
    agent.hear(1)
    agent.feed(Captured(rank=3, step=1, bank=1), BanksRequest(generation=1, term=6))
    (banks,) = agent.feed(HolderAcked(rank=3, name=name(1)))
    assert isinstance(banks, SendBanks) and banks.report.held == (ZERO, name(1))


def test_while_a_copy_is_being_sent_only_the_committed_one_counts_as_held() -> None:
    agent = Agent()
    agent.hear(1)
    agent.hold(1, bank=1)
    agent.hear(2, keep=name(1))
    agent.feed(Captured(rank=3, step=2, bank=0))
    assert agent.state.ranks[0].held == (name(1),)


def test_a_failed_protection_of_the_rollback_step_is_tried_again_when_the_leader_asks() -> None:
    agent = Agent(held=())
    assert agent.feed(ReplicationFailed(rank=3, name=ZERO)) == ()
    effects = agent.feed(BanksRequest(generation=1, term=5))
    assert effects[0] == Replicate(rank=3, name=ZERO, bank=0, keep=None)


def test_copies_for_former_slots_stay_until_something_is_committed() -> None:
    agent = Agent(retired=(8, 9))
    assert agent.feed(BanksRequest(generation=1, term=5))[0] != EmptyHeld(rank=8)
    effects = agent.hear(1, keep=ZERO)
    assert effects[:2] == (EmptyHeld(rank=8), EmptyHeld(rank=9))
    assert EmptyHeld(rank=8) not in agent.hear(2, keep=ZERO)


def test_news_of_foreign_ranks_change_nothing() -> None:
    agent = Agent()
    before = agent.state
    assert agent.feed(BoundaryPassed(rank=1, step=9), Captured(rank=1, step=9, bank=0)) == ()
    assert agent.state == before
