"""A host whose lease has run out: cut off alone, or with all others."""

from __future__ import annotations

from deadpool.runtime.cut_off import CutOff

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
