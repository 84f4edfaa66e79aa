from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from deadpool.config import LivenessConfig
from deadpool.core.silence import OBSERVERS_NEEDED
from deadpool.liveness.neighbour import (
    LEASE_DECIDES,
    Change,
    NeighbourWatch,
    SilenceCallbacks,
    SilenceDetector,
    Verdict,
    neighbours,
)

CONFIG = LivenessConfig(heartbeat_interval_s=0.25, silence_suspect_s=1.0, silence_dead_s=3.0)


class Rig:
    """A detector of member `a` with a clock that is moved by hand."""

    def __init__(self, *members: str) -> None:
        self.now_s = 1000.0
        self.detector = SilenceDetector(CONFIG, "a")
        self.detector.set_members(members, self.now_s)
        assert self.detector.tick(self.now_s) == []

    def run(self, seconds: float, *heard: str) -> list[Verdict]:
        """Tick on time; the members in `heard` send a heartbeat before each tick."""
        verdicts = []
        for _ in range(round(seconds / CONFIG.heartbeat_interval_s)):
            self.now_s += CONFIG.heartbeat_interval_s
            for member in heard:
                returned = self.detector.heard(member, self.now_s)
                verdicts += [returned] if returned else []
            verdicts += self.detector.tick(self.now_s)
        return verdicts

    def pause(self, seconds: float) -> list[Verdict]:
        """This process is stopped for a while, then ticks again."""
        self.now_s += seconds
        return self.detector.tick(self.now_s)


def changes(verdicts: list[Verdict]) -> list[tuple[str, Change]]:
    return [(verdict.member, verdict.change) for verdict in verdicts]


def test_members_that_are_heard_give_no_verdict() -> None:
    assert Rig("b", "c").run(60, "b", "c") == []


def test_a_quiet_member_is_suspect_at_one_second_and_silent_at_three_each_said_once() -> None:
    rig = Rig("b", "c")
    assert rig.run(0.75, "c") == []
    assert changes(rig.run(0.25, "c")) == [("b", Change.SUSPECT)]
    assert rig.run(1.75, "c") == []
    (verdict,) = rig.run(0.25, "c")
    assert (verdict.member, verdict.change, verdict.age_s) == ("b", Change.SILENT, 3.0)
    assert verdict.observers_needed == OBSERVERS_NEEDED
    assert rig.run(20, "c") == []
    assert rig.detector.silent == ("b",)


def test_one_message_brings_a_member_back_and_a_new_silence_is_said_again() -> None:
    rig = Rig("b", "c")
    rig.run(5, "c")
    (verdict,) = rig.run(0.25, "b", "c")
    assert (verdict.change, verdict.age_s) == (Change.RETURNED, 5.25)
    assert rig.detector.silent == ()
    assert changes(rig.run(3, "c")) == [("b", Change.SUSPECT), ("b", Change.SILENT)]


def test_with_a_single_observer_the_lease_decides() -> None:
    (_, verdict) = Rig("b").run(3)
    assert (verdict.change, verdict.observers_needed) == (Change.SILENT, LEASE_DECIDES)


def test_nobody_is_called_silent_by_a_process_that_was_stopped_itself() -> None:
    rig = Rig("b", "c")
    rig.run(2, "b", "c")
    assert rig.pause(60) == []
    assert rig.detector.paused_s == pytest.approx(59.75)
    assert rig.run(0.75) == []
    assert rig.run(5, "b", "c") == []


def test_messages_still_unread_after_a_stop_are_waited_for_even_if_a_member_was_quiet_before() -> None:
    rig = Rig("b", "c")
    assert changes(rig.run(2.75, "c")) == [("b", Change.SUSPECT)]
    assert rig.pause(10) == []
    assert rig.run(2.75, "c") == []
    assert changes(rig.run(0.5, "c")) == [("b", Change.SILENT)]


def test_a_starved_loop_does_not_count_the_time_in_which_it_did_not_look() -> None:
    rig = Rig("b", "c")
    verdicts = []
    for _ in range(11):  # 0.85 s a round, of which 0.25 s count
        rig.detector.heard("c", rig.now_s + 0.85)
        verdicts += rig.pause(0.85)
    assert changes(verdicts) == [("b", Change.SUSPECT)]
    # A dead member is found all the same, only later: 12 intervals make 3 s.
    rig.detector.heard("c", rig.now_s + 0.85)
    assert changes(rig.pause(0.85)) == [("b", Change.SILENT)]


def test_a_loop_that_is_late_by_less_than_an_interval_is_on_time() -> None:
    rig = Rig("b")
    assert rig.pause(0.49) == []
    assert rig.detector.paused_s == 0.0
    assert changes(rig.pause(0.5)) == []
    assert changes(rig.pause(0.02)) == [("b", Change.SUSPECT)]


def test_new_neighbours_get_the_full_grace_period_and_old_ones_keep_their_silence() -> None:
    rig = Rig("b")
    rig.run(0.75)
    rig.detector.set_members(("b", "c"), rig.now_s)
    assert changes(rig.run(0.25)) == [("b", Change.SUSPECT)]
    assert changes(rig.run(0.75)) == [("c", Change.SUSPECT)]
    rig.detector.set_members(("c",), rig.now_s)
    assert changes(rig.run(10)) == [("c", Change.SILENT)]


def test_strangers_are_ignored_and_ages_are_told() -> None:
    rig = Rig("b")
    assert rig.detector.heard("x", rig.now_s) is None
    rig.run(0.5)
    assert rig.detector.ages_s(rig.now_s) == {"b": 0.5}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 40])
def test_watching_is_mutual_and_everybody_has_two_observers_where_there_are_three_members(size: int) -> None:
    members = [f"h{number:02}" for number in range(size)]
    watched = {member: neighbours(member, members) for member in members}
    for member in members:
        assert len(watched[member]) == min(size - 1, 4)
        assert member not in watched[member]
        assert all(member in watched[other] for other in watched[member])


def test_the_watch_sends_heartbeats_tells_of_silence_and_ends_when_closed() -> None:
    sent: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def tell(what: str) -> Callable[[str, object], None]:
        return lambda member, _: told.put((what, member))

    config = LivenessConfig(heartbeat_interval_s=0.02, silence_suspect_s=0.2, silence_dead_s=0.4)
    watch = NeighbourWatch(
        SilenceDetector(config, "a"),
        config.heartbeat_interval_s,
        payload=lambda: 7,
        send=lambda member, payload: sent.put((member, payload)),
        callbacks=SilenceCallbacks(
            on_suspect=tell("suspect"),
            on_silent=tell("silent"),
            on_return=lambda member: told.put(("return", member)),
        ),
    )
    watch.set_members(("a", "b"))
    watch.start()
    try:
        assert sent.get(timeout=10) == ("b", 7)
        assert told.get(timeout=10) == ("suspect", "b")
        assert told.get(timeout=10) == ("silent", "b")
        assert watch.silent() == ("b",)
        watch.heard("b")
        assert told.get(timeout=10) == ("return", "b")
        assert watch.ages_s().keys() == {"b"}
    finally:
        watch.close()


def test_a_watch_that_was_never_started_can_be_closed() -> None:
    silent: SilenceCallbacks = SilenceCallbacks(
        on_suspect=lambda member, age_s: None,
        on_silent=lambda member, needed: None,
        on_return=lambda member: None,
    )
    NeighbourWatch(
        SilenceDetector(CONFIG, "a"), 0.25, payload=lambda: b"", send=lambda m, p: None, callbacks=silent
    ).close()
