"""The leader over a registry in memory: which Views are published, and when it stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.core.membership import Limits
from deadpool.core.types import Ack, Fault, FaultKind, Inventory, MemberId, Name, Phase, RankCopies, View
from deadpool.errors import StoreUnavailable
from deadpool.events import EventLog
from deadpool.liveness.waiting import hash_name
from deadpool.runtime import leader as leader_module
from deadpool.runtime.leader import Leader, LeadershipLost
from deadpool.runtime.messages import Stalled
from tests.unit.runtime.support import TOKEN, Job, make_member, open_log, read_events

ZERO = Name(step=0, generation=1)
FIVE = Name(step=5, generation=1)


class Leading:
    """Member `a` leads a job whose other members are what the test says."""

    def __init__(self, log: EventLog, *spares: MemberId, slots: tuple[MemberId, ...] = ("a", "b")) -> None:
        self.job = Job(*slots, *spares)
        self.slots = slots
        self.queried: list[int] = []
        self.writes: list[tuple[int, str, Callable[[], object]]] = []
        self._log = log
        self.leader = self.elect("a")

    def elect(self, member: MemberId) -> Leader:
        term = self.job.registry.campaign(member, self.job.leases[member])
        assert term is not None
        return Leader(
            member,
            self.job.registry,
            term,
            Limits(),
            (len(self.slots), 1),
            self._log,
            query_stall=self.queried.append,
            write=lambda generation, what, write: self.writes.append((generation, what, write)),
        )

    def start(self) -> None:
        self.leader.start(self.job.registry.members(), (), None)

    def ack(self, phase: Phase, *members: MemberId, copies: dict[MemberId, Inventory] | None = None) -> None:
        for member in members:
            self.leader.acked(
                Ack(
                    member=member,
                    generation=self.view.generation,
                    phase=phase,
                    inventory=(copies or {}).get(member),
                    last_step=6,
                )
            )

    def run(self) -> None:
        """From the first registration to RUNNING."""
        self.start()
        self.ack(Phase.FORMING, *self.slots)

    @property
    def view(self) -> View:
        return self.job.view()

    def phase(self) -> Phase:
        return self.view.phase

    def ending(self) -> tuple[int, str] | None:
        return self.leader.ended


Lead = Callable[..., Leading]


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def lead(events: Path) -> Iterator[Lead]:
    log = open_log(events)

    def make(*spares: MemberId, slots: tuple[MemberId, ...] = ("a", "b")) -> Leading:
        return Leading(log, *spares, slots=slots)

    yield make
    log.close()


def _copies(member: MemberId, rank: int, *, holds: int) -> Inventory:
    """What a host of two has after step 5: its own rank's bank and the other's replica."""
    ranks = (RankCopies(rank=rank, own=(ZERO, FIVE)), RankCopies(rank=holds, held=(ZERO, FIVE)))
    return Inventory(member=member, copies=tuple(sorted(ranks, key=lambda copies: copies.rank)))


def test_the_first_hosts_form_and_run_once_all_have_snapshot_0(lead: Lead, events: Path) -> None:
    leading = lead("c")
    leading.start()
    assert leading.phase() is Phase.FORMING
    assert leading.view.slots == ("a", "b")
    leading.ack(Phase.FORMING, "a")
    assert leading.phase() is Phase.FORMING
    leading.ack(Phase.FORMING, "b")
    assert leading.phase() is Phase.RUNNING
    assert leading.view.rollback == ZERO
    phases = [event["phase"] for event in read_events(events, "view.published")]
    assert phases == ["forming", "running"]


def test_a_host_that_registers_later_completes_the_first_hosts(lead: Lead) -> None:
    leading = lead(slots=("a", "b"))
    leading.leader.start((leading.job.members["a"],), (), None)
    assert leading.job.registry.view() == (None, 0)
    leading.leader.joined(leading.job.members["b"])
    assert leading.view.slots == ("a", "b")


def test_a_silence_is_confirmed_by_two_observers_and_the_spare_gets_the_slot(lead: Lead) -> None:
    leading = lead("c", "d")
    leading.run()
    leading.leader.silent("a", ("b",), ())
    leading.leader.silent("a", ("b",), ())
    assert leading.phase() is Phase.RUNNING
    leading.leader.silent("d", ("b",), ())
    view = leading.view
    assert (view.phase, view.generation) == (Phase.ABORTING, 2)
    assert view.slots == ("a", "c")
    assert view.joining == ("c",)
    assert "host-b" in view.reason


def test_the_refusal_of_a_host_itself_needs_no_second_observer(lead: Lead, events: Path) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.silent("a", (), ("b",))
    assert leading.view.slots == ("a", "c")
    (begin,) = read_events(events, "recovery.begin")
    assert (begin["kind"], begin["subject"], begin["host"]) == ("process_gone", "b", "host-b")
    assert begin["ranks"] == [1]


def test_an_observation_that_was_withdrawn_does_not_count(lead: Lead) -> None:
    leading = lead("c", "d")
    leading.run()
    leading.leader.silent("a", ("b",), ())
    leading.leader.silent("a", (), ())
    leading.leader.silent("d", ("b",), ())
    assert leading.phase() is Phase.RUNNING
    leading.leader.silent("a", ("b",), ())
    assert leading.phase() is Phase.ABORTING


def test_of_two_hosts_lost_at_once_the_second_is_confirmed_too(lead: Lead) -> None:
    leading = lead("d", "e", slots=("a", "b", "c"))
    leading.run()
    leading.leader.silent("a", ("b", "c"), ())
    leading.leader.silent("d", ("b",), ())  # publishes the loss of b
    leading.leader.silent("d", ("b", "c"), ())
    assert leading.view.slots == ("a", "d", "e")


def test_a_lost_member_is_fenced_and_may_not_enrol_again(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.silent("a", (), ("b",))
    assert "b" not in {member.id for member in leading.job.registry.members()}


def test_a_leader_that_is_lost_with_another_member_fences_that_one_before_itself(lead: Lead) -> None:
    """Its own fence costs it the leadership, behind which nothing is accepted any more."""
    leading = lead("d", "e", slots=("a", "b", "c"))
    leading.run()
    leading.leader.silent("d", (), ("a", "b"))
    assert leading.view.slots == ("d", "e", "c")
    assert [member.id for member in leading.job.registry.members()] == ["c", "d", "e"]
    assert leading.job.registry.leader() is None


def test_an_expired_lease_is_a_loss(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.lease_expired("b")
    assert leading.view.slots == ("a", "c")


def test_a_recovery_goes_back_to_the_newest_step_that_is_live_and_is_kept(lead: Lead, events: Path) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.silent("a", (), ("b",))
    leading.ack(Phase.ABORTING, "a", copies={"a": _copies("a", 0, holds=1)})
    assert leading.phase() is Phase.RESTORING
    assert leading.view.rollback == FIVE
    leading.ack(Phase.RESTORING, "a", "c")
    view = leading.view
    assert (view.phase, view.generation, view.joining) == (Phase.RUNNING, 2, ())
    (done,) = read_events(events, "recovery.done")
    assert (done["rollback_step"], done["lost_steps"], done["source"]) == (5, 1, "replica")
    for _, _, write in leading.writes:
        write()
    (kept,) = leading.job.registry.recoveries()
    assert (kept["kind"], kept["rollback_step"], kept["generation"]) == ("process_gone", 5, 2)


@pytest.mark.parametrize("taken_over_in", [Phase.ABORTING, Phase.RESTORING])
def test_a_recovery_whose_leader_is_lost_is_told_to_its_end_by_the_next_one(
    lead: Lead, events: Path, taken_over_in: Phase
) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.silent("c", (), ("b",))
    inventory = {"a": _copies("a", 0, holds=1)}
    if taken_over_in is Phase.RESTORING:
        leading.ack(Phase.ABORTING, "a", copies=inventory)
    assert leading.phase() is taken_over_in
    leading.job.store.lease_revoke(leading.job.leases["a"].id)
    leading.job.leases["a"] = leading.job.store.lease_grant(60.0)
    leading.job.registry.register_again(
        leading.job.members["a"], leading.job.leases["a"], TOKEN, holds_slot=True
    )
    leading.leader = leading.elect("c")
    leading.leader.start(leading.job.registry.members(), (), None, ran_with=("a", "b"))
    if taken_over_in is Phase.ABORTING:
        leading.ack(Phase.ABORTING, "a", copies=inventory)
    leading.ack(Phase.RESTORING, "a", "c")
    assert leading.phase() is Phase.RUNNING
    (done,) = read_events(events, "recovery.done")
    assert (done["generation"], done["rollback_step"], done["replaced"]) == (2, 5, ["b"])


def test_when_all_ranks_have_finished_the_job_ends(lead: Lead) -> None:
    leading = lead()
    leading.run()
    leading.leader.finished("a", 1)
    assert leading.ending() is None
    leading.leader.finished("b", 1)
    assert leading.phase() is Phase.FINISHED
    ending = leading.ending()
    assert ending is not None
    assert ending[0] == 0


def test_a_fault_of_an_older_generation_changes_nothing(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.fault(Fault(kind=FaultKind.WORKER_EXIT, member="b", generation=0, ranks=(1,), step=3))
    assert leading.phase() is Phase.RUNNING


# ---- stalls --------------------------------------------------------------------------------------------


def _stalled(
    *calls: tuple[int, int, int],
    generation: int = 1,
    is_late: bool = True,
    operation: str = "allreduce",
    step: int = 8,
) -> Stalled:
    """Ranks that wait, each as (rank, hash of the group's name, collectives issued)."""
    return Stalled(
        member="a",
        generation=generation,
        ranks=[rank for rank, _, _ in calls],
        tick_frozen=[False for _ in calls],
        finished_step=[step for _ in calls],
        is_quiet=[False for _ in calls],
        handles=[
            [(group, issued, issued - 1, (hash_name(operation) & 0xFFFF) << 48 | 64)]
            for _, group, issued in calls
        ],
        names={1: "7 (DATA_PARALLEL_GROUP, ranks 0,1)"},
        is_late=is_late,
    )


def test_of_a_stall_every_host_is_asked_once_and_who_others_wait_for_is_replaced(
    lead: Lead, events: Path
) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.stalled(_stalled((0, 1, 20)))
    leading.leader.stalled(_stalled((0, 1, 20)))
    assert leading.queried == [1]
    assert leading.phase() is Phase.RUNNING
    leading.leader.stalled(_stalled((1, 1, 19), is_late=False))
    assert leading.view.slots == ("a", "c")
    (begin,) = read_events(events, "recovery.begin")
    assert (begin["kind"], begin["ranks"]) == ("worker_stuck", [1])


def test_a_stall_without_a_culprit_changes_nothing(lead: Lead, events: Path) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 20)))
    assert leading.phase() is Phase.RUNNING
    assert not read_events(events, "collective.disagreement")


def test_a_collective_that_takes_long_blames_nobody_before_the_progress_timeout(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 19), is_late=False))
    assert leading.phase() is Phase.RUNNING


def test_ranks_that_wait_in_different_calls_are_named_with_group_and_call(lead: Lead, events: Path) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.stalled(_stalled((0, 1, 20), is_late=False))
    leading.leader.stalled(_stalled((1, 1, 20), is_late=False, operation="all_gather_base"))
    (event,) = read_events(events, "collective.disagreement")
    assert event["ranks"] == [0, 1]
    assert event["detail"] == (
        "rank 0 waits in allreduce of 64 bytes, call 20 of group 7 (DATA_PARALLEL_GROUP, ranks 0,1); "
        "rank 1 waits in all_gather_base of 64 bytes, call 20 of group 7 (DATA_PARALLEL_GROUP, ranks 0,1)"
    )
    assert leading.phase() is Phase.RUNNING


def test_answers_that_come_late_start_no_other_round_of_questions(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    for _ in range(5):
        leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 20)))
    assert leading.queried == [1]


def test_a_step_that_is_late_is_looked_into_right_after_a_collective_that_takes_long(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    for _ in range(3):
        leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 19), is_late=False))
    assert leading.queried == [1]
    leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 19)))
    assert leading.queried == [1, 1]
    assert leading.view.slots == ("a", "c")


def test_a_stall_is_looked_into_again_while_it_lasts(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "STALL_AGAIN_S", 0.0)
    leading = lead("c")
    leading.run()
    leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 20)))
    leading.leader.tick()
    assert leading.queried == [1, 1]
    leading.leader.stalled(_stalled((0, 1, 21), (1, 1, 20), is_late=False))
    assert leading.view.slots == ("a", "c"), "the one that the other waits for by now is replaced"


def test_a_stall_that_is_over_is_not_looked_into_again(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "STALL_AGAIN_S", 0.0)
    leading = lead("c")
    leading.run()
    leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 20)))
    leading.leader.tick()
    leading.leader.stalled(_stalled((0, 1, 20), (1, 1, 20), is_late=False, step=9))
    leading.leader.tick()
    assert leading.queried == [1, 1]
    assert leading.phase() is Phase.RUNNING


def test_a_stall_of_an_older_generation_is_not_looked_into(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    leading.leader.stalled(_stalled((0, 1, 20), generation=0))
    assert leading.queried == []


# ---- leadership ----------------------------------------------------------------------------------------


def test_a_leader_stops_when_the_view_was_changed_behind_its_back(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    job = leading.job
    pair = job.store.get(job.registry.view_key)
    assert pair is not None
    job.store.put(job.registry.view_key, pair.value)
    with pytest.raises(LeadershipLost, match="generation 2"):
        leading.leader.silent("a", (), ("b",))
    assert leading.phase() is Phase.RUNNING
    assert "b" in {member.id for member in job.registry.members()}  # nothing behind the View was done


def test_a_leader_stops_when_it_holds_the_leadership_no_more(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    leading.job.store.lease_revoke(leading.job.leases["a"].id)
    leading.elect("c")
    with pytest.raises(LeadershipLost):
        leading.leader.silent("c", (), ("b",))
    assert leading.phase() is Phase.RUNNING


def test_a_leader_that_cannot_reach_the_store_says_so(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    leading.job.store.set_reachable(False)
    with pytest.raises(StoreUnavailable):
        leading.leader.silent("a", (), ("b",))
    leading.job.store.set_reachable(True)
    assert leading.phase() is Phase.RUNNING


def test_a_new_leader_reads_what_was_acked_to_the_one_before(lead: Lead) -> None:
    leading = lead("c")
    leading.start()
    leading.ack(Phase.FORMING, "b")
    for member in ("a", "b"):
        leading.job.registry.put_ack(Ack(member=member, generation=1, phase=Phase.FORMING))
    leading.job.store.lease_revoke(leading.job.leases["a"].id)
    leading.job.leases["a"] = leading.job.store.lease_grant(60.0)
    leading.job.registry.register(leading.job.members["a"], leading.job.leases["a"], TOKEN)
    leading.leader = leading.elect("c")
    leading.start()
    assert leading.phase() is Phase.RUNNING


def test_a_new_leader_reads_what_was_reported_to_nobody(lead: Lead) -> None:
    leading = lead("c")
    leading.run()
    fault = Fault(kind=FaultKind.WORKER_EXIT, member="b", generation=1, ranks=(1,), step=3)
    leading.job.registry.put_fault(fault)
    leading.leader = leading.elect("a")
    leading.start()
    assert leading.phase() is Phase.ABORTING
    assert leading.view.slots == ("a", "c")


def test_a_host_that_does_not_fit_is_fenced_and_quarantined(lead: Lead, events: Path) -> None:
    leading = lead()
    leading.run()
    misfit = make_member("z", nproc=8)
    lease = leading.job.store.lease_grant(60.0)
    leading.job.registry.register(misfit, lease, TOKEN)
    leading.leader.joined(misfit)
    assert [each.host for each in leading.job.registry.quarantined()] == ["host-z"]
    (fenced,) = read_events(events, "member.quarantined")
    assert fenced["subject"] == "z"


def test_a_leader_that_is_the_stale_host_itself_forms_the_job_of_the_others_and_goes(lead: Lead) -> None:
    leading = lead("d", slots=("a", "b", "c"))
    registry = leading.job.registry
    stale, *others = registry.members()
    leading.leader.start((replace(stale, versions=(("torch", "2.12"),)), *others), (), None)
    assert leading.view.slots == ("b", "c", "d")
    assert [each.host for each in registry.quarantined()] == ["host-a"]
    assert registry.leader() is None


def test_the_loss_of_the_leader_itself_is_kept_with_its_name(lead: Lead) -> None:
    """Its lease is ended at once, so that the next leader has never seen its registration."""
    leading = lead("c", "d")
    leading.run()
    leading.job.store.lease_revoke(leading.job.leases["a"].id)
    leading.leader = leading.elect("d")
    leading.start()
    for observer in ("b", "d"):
        leading.leader.silent(observer, ("a",), ())
    assert leading.view.slots == ("c", "b")
    leading.ack(Phase.ABORTING, "b", copies={"b": _copies("b", 1, holds=0)})
    leading.ack(Phase.RESTORING, "b", "c")
    for _, _, write in leading.writes:
        write()
    (kept,) = leading.job.registry.recoveries()
    assert (kept["kind"], kept["subject"], kept["replaced"]) == ("silence", "a", ["a"])


def test_of_two_hosts_lost_in_one_recovery_both_are_kept(lead: Lead) -> None:
    leading = lead("d", "e", slots=("a", "b", "c"))
    leading.run()
    leading.leader.silent("a", (), ("b",))
    leading.leader.silent("a", (), ("c",))
    copies = {"a": Inventory(member="a", copies=tuple(RankCopies(rank=r, own=(FIVE,)) for r in range(3)))}
    leading.ack(Phase.ABORTING, "a", copies=copies)
    leading.ack(Phase.RESTORING, "a", "d", "e")
    for _, _, write in leading.writes:
        write()
    (kept,) = leading.job.registry.recoveries()
    assert kept["replaced"] == ["b", "c"]
