"""Named capture on two hosts: real segments, a pusher driven by hand, messages pumped by the test."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import pytest

from deadpool.core.types import MemberId, Name
from deadpool.runtime.messages import Captured, CaptureStep, Refused, Relay, WithdrawStep
from deadpool.runtime.protection import Protection, ProtectionCallbacks
from deadpool.store.host_memory import HostMemoryStore
from tests.unit.runtime.support import LAYOUT, fill, make_view

TERM = 7


def named(step: int, generation: int = 1) -> Name:
    return Name(step=step, generation=generation)


class Host:
    """One host with one rank. `log` has what its pusher and its worker were told, in order."""

    def __init__(self, id: MemberId, rank: int, mail: deque[tuple[MemberId, Relay]]) -> None:
        self.id = id
        self.rank = rank
        self.log: list[object] = []
        self.committed: list[Name] = []
        self.refused: list[tuple[int, int, str]] = []
        self.lasting: list[tuple[int, int, str]] = []
        self.failed: list[tuple[int, int, str]] = []
        self.unprotected: list[tuple[Name | None, int, float, bool]] = []
        self.now_s = 0.0
        self.held: list[tuple[int, Name]] = []
        self.finished_step = 0
        self.leader: MemberId = "a"
        self.store = HostMemoryStore(id)
        segment = self.store.create_own(rank, LAYOUT)
        segment.write_once(b"record")
        fill(segment, 0, named(0))
        self.protection = Protection(
            id,
            self.store,
            self,
            ProtectionCallbacks(
                send=lambda member, relay: mail.append((member, relay)),
                leader=lambda: self.leader,
                tell_worker=self._tell_worker,
                finished_step=lambda rank: self.finished_step,
                committed=self.committed.append,
                refused=self._on_refused,
                failed=lambda rank, step, why: self.failed.append((rank, step, why)),
                unprotected=lambda *said: self.unprotected.append(said),
                held=lambda rank, name: self.held.append((rank, name)),
            ),
            clock=lambda: self.now_s,
        )

    def push(self, rank: int, name: Name, bank: int, holders: Sequence[MemberId], keep: Name | None) -> None:
        self.log.append(("push", rank, name, bank, tuple(holders), keep))

    def stop(self, rank: int, bank: int) -> None:
        self.log.append(("stop", rank, bank))

    def _on_refused(self, rank: int, step: int, why: str, is_lasting: bool) -> None:
        self.refused.append((rank, step, why))
        if is_lasting:
            self.lasting.append((rank, step, why))

    def _tell_worker(self, rank: int, message: CaptureStep | WithdrawStep) -> None:
        assert rank == self.rank
        self.log.append(message)

    @property
    def namings(self) -> list[CaptureStep]:
        return [entry for entry in self.log if isinstance(entry, CaptureStep)]

    def capture(self, naming: CaptureStep) -> None:
        """The worker obeys a naming."""
        name = named(naming.step, naming.generation)
        segment = self.store.own(self.rank)
        assert segment is not None
        fill(segment, naming.bank, name)
        self.finished_step = naming.step
        self.protection.captured(self.rank, Captured(name=name, bank=naming.bank, blob_len=10))

    def train(self, seconds: int) -> None:
        """Steps of a second, none of which is captured."""
        for _ in range(seconds):
            self.finished_step += 1
            self.now_s += 1.0
            self.protection.tick()

    def hold(self, name: Name) -> None:
        """The rank's holder answers."""
        self.protection.holder_acked(self.rank, name)


class Pair:
    """Two hosts that hold each other's copies; `a` leads."""

    def __init__(self) -> None:
        self.mail: deque[tuple[MemberId, Relay]] = deque()
        self.a = Host("a", 0, self.mail)
        self.b = Host("b", 1, self.mail)
        self.view = make_view(["a", "b"], rollback=named(0))

    def start(self) -> None:
        for host in (self.a, self.b):
            host.protection.start(self.view, named(0))
        self.a.protection.lead(self.view, named(0), TERM)
        self.pump()

    def pump(self) -> None:
        """Deliver every message until nobody says anything."""
        while self.mail:
            member, relay = self.mail.popleft()
            {"a": self.a, "b": self.b}[member].protection.relayed(relay)

    def protect_start(self) -> tuple[CaptureStep, CaptureStep]:
        """Start, and let both holders have snapshot 0; returns the first naming of each worker."""
        self.start()
        for host in (self.a, self.b):
            host.hold(named(0))
        self.pump()
        return self.a.namings[-1], self.b.namings[-1]

    def commit(self, step: int) -> None:
        """Let both workers obey the newest naming, which is of `step`, and both holders have it."""
        for host in (self.a, self.b):
            assert host.namings[-1].step == step
            host.capture(host.namings[-1])
            host.hold(named(step))
        self.pump()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for host in (made.a, made.b):
        host.store.close()


def test_first_of_all_snapshot_0_is_pushed_to_the_hosts_that_the_view_names(pair: Pair) -> None:
    pair.start()
    assert pair.a.log == [("push", 0, named(0), 0, ("b",), None)]
    assert pair.b.log == [("push", 1, named(0), 0, ("a",), None)]
    assert pair.a.committed == pair.b.committed == []


def test_nothing_is_committed_before_every_holder_has_snapshot_0(pair: Pair) -> None:
    pair.start()
    pair.a.hold(named(0))
    pair.pump()
    assert pair.a.committed == []
    assert pair.a.namings == pair.b.namings == []
    pair.b.hold(named(0))
    pair.pump()
    assert pair.a.committed == [named(0)]
    assert pair.a.protection.protected == named(0)


def test_a_naming_reaches_every_worker_with_the_bank_that_may_be_overwritten(pair: Pair) -> None:
    namings = pair.protect_start()
    expected = CaptureStep(generation=1, step=1, bank=1, committed_step=0)
    assert namings == (expected, expected)


def test_a_captured_step_is_pushed_and_says_which_name_its_holder_must_keep(pair: Pair) -> None:
    for_a, _ = pair.protect_start()
    pair.a.capture(for_a)
    assert pair.a.log[-1] == ("push", 0, named(1), 1, ("b",), named(0))


def test_a_step_held_for_all_ranks_is_committed_and_the_next_goes_into_the_other_bank(pair: Pair) -> None:
    pair.protect_start()
    pair.commit(1)
    assert pair.a.protection.protected == named(1)
    assert pair.a.namings[-1] == CaptureStep(generation=1, step=2, bank=0, committed_step=1)
    assert pair.b.namings[-1] == CaptureStep(generation=1, step=2, bank=0, committed_step=1)
    assert pair.b.committed == [named(0), named(1)]  # a follower learns it with the next naming
    pair.commit(2)
    assert pair.a.committed == [named(0), named(1), named(2)]
    assert pair.a.namings[-1].bank == 1


def test_a_step_held_for_one_rank_only_is_not_committed(pair: Pair) -> None:
    for_a, _ = pair.protect_start()
    pair.a.capture(for_a)
    pair.a.hold(named(1))
    pair.pump()
    assert pair.a.committed == [named(0)]
    assert pair.a.namings == [for_a]


def test_a_refusal_of_one_worker_is_told_and_a_later_step_is_named_at_once(pair: Pair) -> None:
    _, for_b = pair.protect_start()
    pair.b.finished_step = 4
    why = "its boundary had passed"
    pair.b.protection.refused(1, Refused(generation=1, step=for_b.step, at_step=4, why=why))
    pair.pump()
    assert pair.b.refused == [(1, 1, "its boundary had passed")]
    assert pair.b.lasting == []
    assert pair.a.namings[-1].step > 4
    assert pair.a.namings[-1].step == pair.b.namings[-1].step
    assert pair.a.namings[-1].committed_step == 0


def test_that_no_later_step_can_be_captured_either_is_told_and_the_next_is_named_all_the_same(
    pair: Pair,
) -> None:
    _, for_b = pair.protect_start()
    pair.b.protection.refused(
        1, Refused(generation=1, step=for_b.step, at_step=1, why="w moved", is_lasting=True)
    )
    pair.pump()
    assert pair.b.lasting == [(1, 1, "w moved")]
    assert pair.b.namings[-1].step > for_b.step  # the script may mend it


def test_a_step_that_a_rank_has_passed_is_refused_without_asking_its_worker(pair: Pair) -> None:
    pair.start()
    pair.b.finished_step = 9
    pair.a.hold(named(0))
    pair.b.hold(named(0))
    pair.pump()
    assert [naming.step for naming in pair.b.namings] == [pair.b.namings[-1].step]
    assert pair.b.namings[-1].step > 9


def test_a_stream_is_stopped_before_its_bank_is_given_to_a_worker_again(pair: Pair) -> None:
    for_a, for_b = pair.protect_start()
    pair.a.capture(for_a)  # its stream reads bank 1 from now on
    pair.b.protection.refused(1, Refused(generation=1, step=for_b.step, at_step=3, why="late"))
    pair.pump()
    assert pair.a.namings[-1].bank == for_a.bank
    stopped = pair.a.log.index(("stop", 0, for_a.bank))
    assert stopped == pair.a.log.index(pair.a.namings[-1]) - 1
    assert ("stop", 1, for_b.bank) not in pair.b.log  # nothing reads it there


def test_the_answer_of_a_holder_to_a_stopped_stream_commits_nothing(pair: Pair) -> None:
    for_a, for_b = pair.protect_start()
    pair.a.capture(for_a)
    pair.b.protection.refused(1, Refused(generation=1, step=for_b.step, at_step=3, why="late"))
    pair.pump()
    pair.a.hold(named(1))
    pair.b.hold(named(1))
    pair.pump()
    assert pair.a.committed == [named(0)]


def test_a_copy_that_cannot_be_delivered_is_refused_and_another_step_is_named(pair: Pair) -> None:
    for_a, for_b = pair.protect_start()
    pair.a.capture(for_a)
    pair.b.capture(for_b)
    pair.b.protection.replication_failed(1, named(1), "the holder is full")
    pair.pump()
    assert pair.b.failed == pair.b.refused == [(1, 1, "the holder is full")]
    assert pair.b.lasting == []
    assert pair.a.namings[-1].step == pair.b.namings[-1].step > 1


def test_what_a_leader_of_an_earlier_term_says_is_not_obeyed(pair: Pair) -> None:
    pair.protect_start()
    told = len(pair.b.log)
    pair.b.protection.lead(pair.view, named(0), TERM - 1)
    pair.pump()
    assert len(pair.b.log) == told
    assert not pair.b.committed[1:]


def test_a_new_leader_withdraws_what_the_one_before_it_named(pair: Pair) -> None:
    pair.protect_start()
    pair.a.leader = pair.b.leader = "b"
    pair.b.protection.lead(pair.view, named(0), TERM + 1)
    pair.pump()
    assert pair.b.protection.is_leading(1, TERM + 1)
    withdrawn = WithdrawStep(generation=1, step=1)
    assert pair.a.log[-2:] == pair.b.log[-2:] == [withdrawn, pair.a.namings[-1]]
    pair.commit(pair.a.namings[-1].step)
    assert pair.b.protection.protected == named(1)


def test_after_the_stop_nothing_that_comes_late_is_carried_out(pair: Pair) -> None:
    for_a, _ = pair.protect_start()
    pair.a.capture(for_a)
    late = list(pair.mail)
    for host in (pair.a, pair.b):
        host.protection.stop()
        host.log.clear()
        host.committed.clear()
    pair.a.capture(for_a)
    pair.a.protection.refused(0, Refused(generation=1, step=1, at_step=1, why="late"))
    pair.a.hold(named(1))
    pair.a.protection.tick()
    pair.mail.extend(late)
    pair.pump()
    assert pair.a.log == pair.b.log == []
    assert pair.a.committed == pair.b.committed == []
    assert pair.a.refused == []
    assert not pair.a.protection.is_leading(1, TERM)


def test_what_belongs_to_another_generation_changes_nothing(pair: Pair) -> None:
    for_a, _ = pair.protect_start()
    told = list(pair.a.log)
    stale = Captured(name=named(1, generation=0), bank=for_a.bank, blob_len=10)
    pair.a.protection.captured(0, stale)
    pair.a.protection.refused(0, Refused(generation=0, step=1, at_step=1, why="of an older generation"))
    pair.a.protection.relayed(Relay(sender="b", generation=1, kind="NoSuchMessage", body=b""))
    pair.pump()
    assert pair.a.log == told
    assert pair.a.refused == []


def _resume(pair: Pair) -> None:
    """Generation 2 begins from step 1; a spare has taken b's place and holds nothing yet."""
    pair.a.log.clear()
    view = make_view(["a", "c"], generation=2, rollback=named(1))
    pair.a.protection.start(view, named(1))


def test_a_new_generation_sends_the_rollback_step_to_the_holder_that_it_has_now(pair: Pair) -> None:
    for_a, _ = pair.protect_start()
    pair.a.capture(for_a)
    pair.a.hold(named(1))
    pair.a.protection.stop()
    _resume(pair)
    assert pair.a.log == [("push", 0, named(1), 1, ("c",), None)]


def test_a_late_answer_of_the_holder_before_does_not_count_for_the_holder_now(pair: Pair) -> None:
    for_a, _ = pair.protect_start()
    pair.a.capture(for_a)
    pair.a.protection.stop()
    pair.a.hold(named(1))  # was on its way when the View came
    _resume(pair)
    assert pair.a.log == [("push", 0, named(1), 1, ("c",), None)]


def test_a_host_that_gives_up_the_copies_of_a_rank_empties_them_once_something_is_committed(
    pair: Pair,
) -> None:
    fill_held = pair.a.store.create_held(5, LAYOUT)
    fill_held.write_once(b"record")
    fill_held.begin(0, named(0))
    fill_held.complete(0, blob_len=0)
    pair.start()
    assert pair.a.store.held(5) is not None
    for host in (pair.a, pair.b):
        host.hold(named(0))
    pair.pump()
    assert pair.a.store.held(5) is None


def test_steps_that_nobody_names_are_told_by_every_host_and_rank_0_has_its_own(pair: Pair) -> None:
    """As when the leader is gone and the control plane away: no reason comes from anywhere."""
    pair.protect_start()
    pair.commit(1)
    for host in (pair.a, pair.b):
        host.protection.stop()
        host.protection.start(pair.view, named(1))
        host.hold(named(1))
    pair.mail.clear()
    for host in (pair.a, pair.b):
        host.train(60)
        assert host.unprotected == []
        host.train(30)
    protected, step, behind_s, is_first = pair.a.unprotected[0]
    assert (protected, is_first) == (None, True)
    assert behind_s > 80.0  # a minute, and what two attempts at a copy may take
    assert step == 1 + round(behind_s)
    assert pair.b.unprotected[0][3] is False


def test_a_commit_in_time_leaves_nothing_to_tell(pair: Pair) -> None:
    pair.protect_start()
    pair.commit(1)
    pair.a.train(70)
    pair.pump()
    pair.b.finished_step = pair.a.finished_step
    named_step = pair.a.namings[-1].step
    for host in (pair.a, pair.b):
        host.protection.refused(
            host.rank, Refused(generation=1, step=named_step, at_step=host.finished_step, why="late")
        )
    pair.pump()
    step = pair.a.namings[-1].step
    pair.commit(step)
    assert pair.a.protection.protected == named(step)
    pair.a.train(70)
    assert pair.a.unprotected == []
