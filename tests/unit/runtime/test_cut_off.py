"""A host whose lease has run out: cut off alone, or with all others; and one that waits for etcd."""

from __future__ import annotations

import pytest

from deadpool.core.types import Phase, View
from deadpool.runtime.cut_off import CutOff, Stranded
from tests.unit.runtime.support import make_view

GRACE_S = 3.0


def judge(
    cut_off: CutOff, now_s: float, *, overdue: bool = True, heard: bool = True, reaches: bool = False
) -> str:
    return cut_off.judge(overdue, (heard, reaches), now_s)


def test_while_etcd_is_away_for_all_nobody_ends() -> None:
    cut_off = CutOff(GRACE_S)
    assert [judge(cut_off, now_s) for now_s in (0.0, 10.0, 1000.0)] == ["", "", ""]


def test_a_host_that_hears_of_etcd_before_it_reaches_it_may_renew_first() -> None:
    cut_off = CutOff(GRACE_S)
    judge(cut_off, 100.0)
    assert not judge(cut_off, 100.1, reaches=True)
    assert not judge(cut_off, 101.0, reaches=True)
    assert not judge(cut_off, 101.2, overdue=False, reaches=True)
    assert not judge(cut_off, 200.0, reaches=True), "a new grace for a new outage"


def test_a_host_that_is_cut_off_alone_ends_after_the_grace() -> None:
    cut_off = CutOff(GRACE_S)
    for tenth in range(30):
        assert not judge(cut_off, 50.0 + tenth / 10, reaches=True)
    assert "while peers reach" in judge(cut_off, 50.0 + GRACE_S, reaches=True)


def test_a_host_that_was_suspended_may_first_hear_what_was_sent_meanwhile_and_renew() -> None:
    for reaches in (False, True):
        cut_off = CutOff(GRACE_S)
        assert not judge(cut_off, 50.0, overdue=False)
        for tenth in range(30):
            assert not judge(cut_off, 500.0 + tenth / 10, heard=reaches, reaches=reaches)
        assert judge(cut_off, 500.0 + GRACE_S, heard=reaches, reaches=reaches)


def test_a_peer_that_loses_etcd_again_ends_the_count() -> None:
    cut_off = CutOff(GRACE_S)
    judge(cut_off, 0.0, reaches=True)
    judge(cut_off, 2.0)
    assert not judge(cut_off, 4.0, reaches=True)


def test_a_host_that_reaches_nobody_ends_at_once() -> None:
    assert "neither" in judge(CutOff(GRACE_S), 0.0, heard=False)
    assert not judge(CutOff(GRACE_S), 0.0, overdue=False, heard=False)


RUNNING = make_view(("a", "b"), phase=Phase.RUNNING)
LIMIT_S = 300.0


def is_stranded(view: View | None, *, steps: tuple[int, int] = (7, 7), **more: bool) -> bool:
    """Whether a host is given up that has been as it is now for longer than the limit."""
    stranded = Stranded(LIMIT_S)
    known = {"is_reached": False, "needs_view": False, **more}
    found = [
        stranded.judge(view, known["is_reached"], known["needs_view"], [step], now_s)
        for step, now_s in zip(steps, (0.0, LIMIT_S + 1.0), strict=True)
    ]
    assert not found[0]
    return found[1]


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.ABORTING, Phase.RESTORING, Phase.STALLED])
def test_a_host_of_a_job_that_forms_or_recovers_gives_up_when_etcd_stays_away(phase: Phase) -> None:
    view = make_view(("a", "b"), phase=phase)
    assert is_stranded(view)
    assert is_stranded(None)
    assert not is_stranded(view, is_reached=True)


def test_a_job_that_trains_goes_on_without_etcd() -> None:
    assert not is_stranded(RUNNING)
    assert not is_stranded(RUNNING, needs_view=True, steps=(7, 8))  # what it has told is no matter any more


def test_a_host_that_has_told_a_fault_and_finishes_no_step_gives_up() -> None:
    assert is_stranded(RUNNING, needs_view=True)
    assert not is_stranded(RUNNING, needs_view=True, is_reached=True)


@pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.HALTED])
def test_a_job_that_is_over_needs_no_etcd(phase: Phase) -> None:
    assert not is_stranded(make_view(("a", "b"), phase=phase), needs_view=True)
