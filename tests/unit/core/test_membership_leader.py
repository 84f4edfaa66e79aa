"""The leader's machine: changes of leader, the end, and events that come late or twice."""

from __future__ import annotations

from dataclasses import replace

from deadpool.core.membership import (
    Acked,
    Finished,
    LeaderElected,
    StoreReturned,
)
from deadpool.core.types import (
    Ack,
    FaultKind,
    Member,
    Phase,
)
from deadpool.testing.membership_world import make_member
from tests.unit.core.job import Job

# --- Grace after an election or an outage of the store ---


def test_a_key_missing_at_an_election_is_no_evidence_for_two_ttls() -> None:
    job = Job.running()
    members = tuple(m for m in job.state.members if m.id != "m1")
    job.feed(LeaderElected(view=job.view, members=members, now_s=0.0))
    job.tick(9)
    assert job.view.generation == 1
    job.join(1)  # it registers again, under the same incarnation
    job.tick(2)
    assert job.view.generation == 1


def test_a_key_still_missing_after_the_grace_is_a_death() -> None:
    job = Job.running()
    members = tuple(m for m in job.state.members if m.id not in ("m1", "m2"))
    job.feed(LeaderElected(view=job.view, members=members, now_s=0.0))
    job.tick(10)
    assert (job.view.generation, job.view.slots) == (2, ("m0", "m3", ""))


def test_confirmed_silence_needs_no_grace() -> None:
    job = Job.running()
    members = tuple(m for m in job.state.members if m.id != "m1")
    job.feed(LeaderElected(view=job.view, members=members, now_s=0.0))
    job.silence(1, 0, 2)
    assert job.view.slots == ("m0", "m3", "m2")


def test_leases_that_expire_while_the_store_was_away_are_no_evidence() -> None:
    job = Job.running()
    job.feed(StoreReturned(now_s=0.0))
    job.lose(0, 1, 2)
    job.tick(9)
    assert job.view.generation == 1
    for index in (0, 1, 2):
        job.join(index)
    job.tick(2)
    assert job.view.generation == 1


# --- Another leader ---


def test_a_new_leader_resumes_a_recovery_from_the_view_and_the_acks() -> None:
    job = Job.running()
    job.lose(1)
    members = job.state.members
    job.feed(LeaderElected(view=job.view, members=members, now_s=0.0))
    assert job.effects == ()
    job.ack(0, 2)
    assert (job.view.generation, job.view.phase) == (2, Phase.RESTORING)


def test_a_new_leader_keeps_the_rollback_that_the_old_one_fixed() -> None:
    job = Job.running()
    job.lose(1)
    job.ack(0, 2)
    view = job.view
    job.feed(LeaderElected(view=view, members=job.state.members, now_s=0.0))
    job.ack(0, 2, 3)
    assert (job.view.phase, job.view.rollback) == (Phase.RUNNING, view.rollback)


def test_a_new_leader_knows_from_older_acks_how_long_restoring_may_take() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0, 2)
    view = job.view
    job.feed(LeaderElected(view=view, members=job.state.members, now_s=0.0))
    for member, extra_s in (("m0", 90.0), ("m2", 7.0)):
        ack = Ack(member=member, generation=2, phase=Phase.ABORTING, restore_extra_s=extra_s)
        job.feed(Acked(ack=ack, now_s=0.0))
    job.ack(0, 2)
    job.tick(129)
    assert job.view == view
    job.tick(1)
    assert job.fenced == {"m3": True}


def test_a_new_leader_of_a_job_that_is_over_only_ends_it() -> None:
    job = Job.running()
    for index in range(3):
        job.feed(Finished(member_id=f"m{index}", generation=1, now_s=0.0))
    assert (job.view.phase, job.exit_code) == (Phase.FINISHED, 0)
    job.feed(LeaderElected(view=job.view, members=job.state.members, now_s=0.0))
    assert (job.published, job.exit_code) == ([], 0)


def test_a_new_leader_never_turns_away_members_that_hold_slots() -> None:
    job = Job.running()
    odd = (replace(make_member(9), versions=(("torch", "0"),)), *job.state.members)
    job.feed(LeaderElected(view=job.view, members=odd, now_s=0.0))
    assert job.fenced == {"m9": True}


# --- The end ---


def test_the_job_is_finished_when_every_slot_is() -> None:
    job = Job.running()
    for index in (0, 1):
        job.feed(Finished(member_id=f"m{index}", generation=1, now_s=0.0))
    assert job.view.phase is Phase.RUNNING
    job.feed(Finished(member_id="m2", generation=1, now_s=0.0))
    assert (job.view.exit_code, job.exit_code) == (0, 0)


def test_a_finished_rank_takes_part_in_a_recovery_and_must_finish_again() -> None:
    job = Job.running()
    for index in (0, 2):
        job.feed(Finished(member_id=f"m{index}", generation=1, now_s=0.0))
    job.lose(1)
    job.ack(0, 2)
    job.ack(0, 2, 3)
    job.feed(Finished(member_id="m3", generation=2, now_s=0.0))
    assert job.view.phase is Phase.RUNNING


def test_nothing_happens_after_the_end() -> None:
    job = Job.running(spares=0)
    job.lose(1)
    job.ack(0, 2)
    job.tick(100)
    before = job.state
    job.join(5)
    job.lose(0)
    job.tick(1000)
    assert (job.state, job.effects) == (before, ())


# --- Stale and doubled events ---


def test_an_incarnation_that_was_replaced_never_comes_back() -> None:
    job = Job.running()
    job.silence(1, 0, 2)
    members = job.state.members
    job.join(1)
    assert job.state.members == members
    assert job.fenced == {"m1": False}


def test_events_heard_twice_change_nothing() -> None:
    job = Job.running()
    job.lose(1)
    job.ack(0)
    before = job.state
    job.ack(0)
    job.lose(1)
    job.join(2)
    assert job.state == before


def test_faults_and_acks_of_another_generation_change_nothing() -> None:
    job = Job.running()
    job.lose(1)
    before = job.state
    for generation in (1, 3):
        for kind in FaultKind:
            if kind is not FaultKind.SPARE_FAILED:
                job.fault(kind, 0, generation=generation)
        ack = Ack(member="m0", generation=generation, phase=Phase.ABORTING)
        job.feed(Acked(ack=ack, now_s=0.0))
        job.feed(Finished(member_id="m0", generation=generation, now_s=0.0))
    assert job.state == before


def test_an_ack_of_another_phase_changes_nothing() -> None:
    job = Job.running()
    job.lose(1)
    before = job.state
    job.feed(Acked(ack=Ack(member="m0", generation=2, phase=Phase.RESTORING), now_s=0.0))
    assert job.state == before


def test_states_are_values() -> None:
    assert hash(Job.running().state) == hash(Job.running().state)
    assert Job.running().state == Job.running().state
    other = Job.running()
    other.lose(0)
    assert other.state != Job.running().state


def test_a_spare_in_another_rack_than_the_holders_is_preferred() -> None:
    job = Job(slots=2)
    for index, rack in enumerate(("A", "B", "B", "C")):
        job.join(index, domain=rack)
    job.ack(0, 1)
    job.lose(0)
    assert job.view.slots == ("m3", "m1")


def test_members_are_what_registrations_say() -> None:
    member: Member = make_member(4, 2, domain="rack 7")
    assert (member.id, member.host, member.nproc, member.domain) == ("m4", "h4", 2, "rack 7")
