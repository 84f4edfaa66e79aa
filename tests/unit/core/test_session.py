"""One rank's machine."""

from __future__ import annotations

from dataclasses import replace

from deadpool.core.session import (
    AbortInner,
    AckAborted,
    AckRestored,
    Closed,
    CloseHandles,
    Done,
    Enter,
    Exit,
    Freeze,
    Rebuild,
    ReportFinished,
    Restore,
    Restored,
    SessionEffect,
    SessionEvent,
    SessionState,
    StepFinished,
    Unwound,
    ViewSeen,
    step,
)
from deadpool.core.types import Name, Phase, Source, View

FORMING = View(generation=1, phase=Phase.FORMING, slots=("a", "b"), nproc=1)
RUNNING = replace(FORMING, phase=Phase.RUNNING, rollback=Name(step=0, generation=1))
ABORTING = View(generation=2, phase=Phase.ABORTING, slots=("a", "s"), nproc=1, joining=("s",))
BACK = Name(step=4, generation=1)
RESTORING = replace(ABORTING, phase=Phase.RESTORING, rollback=BACK)
AGAIN = replace(RESTORING, phase=Phase.RUNNING, joining=())


class Worker:
    """Feeds one rank's session and keeps what it did."""

    def __init__(self, rank: int = 0, member: str = "a") -> None:
        self.state = SessionState(rank=rank, member=member)
        self.effects: tuple[SessionEffect, ...] = ()

    def feed(self, *events: SessionEvent) -> tuple[SessionEffect, ...]:
        self.effects = ()
        for event in events:
            self.state, effects = step(self.state, event)
            self.effects += effects
        return self.effects

    def see(self, *views: View) -> tuple[SessionEffect, ...]:
        return self.feed(*(ViewSeen(view=view) for view in views))


def started() -> Worker:
    worker = Worker()
    worker.see(FORMING)
    worker.feed(Restored(generation=1))
    worker.see(RUNNING)
    return worker


def test_a_first_start_builds_acks_and_enters_at_the_first_step() -> None:
    worker = Worker()
    assert worker.see(FORMING) == (Rebuild(generation=1),)
    assert worker.feed(Restored(generation=1)) == (AckRestored(generation=1),)
    assert worker.see(RUNNING) == (Enter(step=0),)


def test_an_abort_closes_then_freezes_then_aborts() -> None:
    assert started().see(ABORTING) == (CloseHandles(generation=1), Freeze(), AbortInner())


def test_the_ack_waits_for_the_abort_and_for_the_unwinding_in_any_order() -> None:
    for events in ((Closed(generation=2), Unwound()), (Unwound(), Closed(generation=2))):
        worker = started()
        worker.see(ABORTING)
        assert worker.feed(events[0]) == ()
        assert worker.feed(events[1]) == (AckAborted(generation=2),)


def test_a_survivor_rebuilds_restores_and_enters_behind_the_rollback_step() -> None:
    worker = started()
    worker.see(ABORTING)
    worker.feed(Closed(generation=2), Unwound())
    assert worker.see(RESTORING) == (
        Rebuild(generation=2),
        Restore(name=BACK, source=Source.MEMORY),
    )
    assert worker.feed(Restored(generation=2)) == (AckRestored(generation=2),)
    assert worker.see(AGAIN) == (Enter(step=4),)


def test_a_worker_that_missed_the_abort_first_aborts_and_then_catches_up() -> None:
    worker = started()
    assert worker.see(RESTORING)[0] == CloseHandles(generation=1)
    assert worker.feed(Closed(generation=2), Unwound()) == (
        AckAborted(generation=2),
        Rebuild(generation=2),
        Restore(name=BACK, source=Source.MEMORY),
    )


def test_a_parked_worker_takes_its_rank_without_an_abort() -> None:
    worker = Worker(rank=1, member="s")
    assert worker.see(RUNNING) == ()
    assert worker.see(ABORTING) == ()
    assert worker.see(RESTORING)[0] == Rebuild(generation=2)
    assert worker.feed(Restored(generation=2)) == (AckRestored(generation=2),)
    assert worker.see(AGAIN) == (Enter(step=4),)


def test_a_fault_while_restoring_aborts_again() -> None:
    worker = started()
    worker.see(ABORTING)
    worker.feed(Closed(generation=2), Unwound())
    worker.see(RESTORING)
    third = replace(ABORTING, generation=3)
    assert worker.see(third) == (CloseHandles(generation=2), Freeze(), AbortInner())
    assert worker.feed(Restored(generation=2)) == ()
    assert worker.feed(Closed(generation=3)) == (AckAborted(generation=3),)


def test_a_fault_during_an_abort_begins_it_anew() -> None:
    worker = started()
    worker.see(ABORTING)
    worker.see(replace(ABORTING, generation=3))
    assert worker.feed(Closed(generation=2), Unwound()) == ()
    assert worker.feed(Closed(generation=3)) == (AckAborted(generation=3),)


def test_a_replaced_worker_exits_with_73() -> None:
    worker = Worker(rank=1, member="b")
    worker.see(FORMING)
    assert worker.see(ABORTING) == (Exit(code=73),)


def test_a_finished_rank_waits_and_takes_part_in_recoveries() -> None:
    worker = started()
    assert worker.feed(Done()) == (ReportFinished(generation=1),)
    worker.see(ABORTING)
    assert worker.feed(Closed(generation=2)) == (AckAborted(generation=2),)


def test_the_end_of_the_job_ends_the_session() -> None:
    finished = replace(RUNNING, phase=Phase.FINISHED, exit_code=0)
    halted = replace(ABORTING, phase=Phase.HALTED, exit_code=4)
    assert started().see(finished) == (Exit(code=0),)
    worker = started()
    assert worker.see(halted) == (Exit(code=4),)
    assert worker.see(replace(halted, generation=9)) == ()


def test_views_seen_twice_or_late_change_nothing() -> None:
    worker = started()
    worker.see(ABORTING)
    before = worker.state
    assert worker.see(ABORTING, RUNNING, FORMING) == ()
    assert worker.state == before


def test_a_step_finished_after_the_abort_began_does_not_count() -> None:
    worker = started()
    worker.feed(StepFinished(step=3))
    worker.see(ABORTING)
    worker.feed(StepFinished(step=4))
    assert worker.state.finished_step == 3
