"""When steps that are finished and not protected are worth a word."""

from __future__ import annotations

from deadpool.core.lag import COUNTED_S, LATE_S, Lag, note_committed, note_finished

DELIVERY_S = 20.0
START = Lag(step=0, step_s=0.0, delivery_s=DELIVERY_S)


def train(lag: Lag, seconds: float, step_s: float = 1.0) -> Lag:
    """Steps of one length that nobody protects."""
    for _ in range(round(seconds / step_s)):
        lag = note_finished(lag, lag.step + 1, lag.step_s + step_s)
    return lag


def test_steps_that_nobody_protects_are_late_once_a_copy_would_have_been_delivered_or_given_up() -> None:
    assert not train(START, LATE_S + DELIVERY_S).is_late
    assert train(START, LATE_S + DELIVERY_S + 1).is_late


def test_a_commit_begins_the_count_anew() -> None:
    lag = note_committed(train(START, LATE_S))
    assert not train(lag, LATE_S).is_late


def test_a_pause_between_two_steps_counts_no_more_than_a_step() -> None:
    lag = note_finished(START, 1, 3600.0)
    assert lag.behind_s == COUNTED_S
    assert not lag.is_late


def test_a_step_that_is_heard_of_again_does_not_count() -> None:
    lag = note_finished(START, 3, 5.0)
    assert note_finished(lag, 3, 60.0) is lag
    assert note_finished(lag, 2, 60.0) is lag


def test_where_commits_are_rare_more_time_must_pass() -> None:
    rare = note_committed(train(START, 70.0))
    assert not train(rare, 5 * 70.0).is_late
    assert train(rare, 5 * 70.0 + 1).is_late


def test_an_outage_is_forgotten_after_some_commits() -> None:
    lag = note_committed(train(START, 3600.0))
    for _ in range(8):
        lag = note_committed(train(lag, 1.0))
    assert train(lag, LATE_S + DELIVERY_S + 1).is_late
