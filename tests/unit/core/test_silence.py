"""Who hears nothing of whom, and when that is a death."""

from __future__ import annotations

from deadpool.core.silence import NO_SILENCES


def test_one_observer_proves_nothing_and_two_do() -> None:
    said = NO_SILENCES.say("a", ["x"], [])
    assert not said.is_death("x")
    assert said.say("b", ["x"], []).is_death("x")


def test_the_refusal_of_a_host_needs_no_second_observer() -> None:
    assert NO_SILENCES.say("a", [], ["x"]).is_death("x")


def test_a_member_says_nothing_of_itself() -> None:
    assert not NO_SILENCES.say("a", ["x"], []).say("x", ["x"], []).is_death("x")


def test_what_an_observer_says_replaces_what_it_said() -> None:
    said = NO_SILENCES.say("a", ["x"], []).say("a", ["y"], []).say("b", ["x"], [])
    assert not said.is_death("x")
    assert said.say("b", ["y"], []).is_death("y")


def test_the_word_of_who_is_gone_counts_no_more() -> None:
    said = NO_SILENCES.say("a", ["x"], []).without({"a"})
    assert not said.say("b", ["x"], []).is_death("x")


def test_a_link_is_a_word_of_one_on_another_of_the_same_hosts() -> None:
    said = NO_SILENCES.say("a", ["b", "spare"], []).say("spare", ["a"], [])
    assert said.links({"a", "b", "c"}) == [("a", "b")]
