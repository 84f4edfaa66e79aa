"""The leader's machine: hosts that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deadpool.core.membership import (
    Acked,
    CheckpointFound,
    Fence,
    LeaderElected,
    MemberJoined,
    PublishView,
)
from deadpool.core.types import (
    Ack,
    FaultKind,
    Inventory,
    Name,
    Phase,
    Source,
)
from deadpool.testing.membership_world import make_member
from tests.unit.core.job import FIVE, Job

GOOD, STALE, ODD = (("torch", "2.13"),), (("torch", "2.12"),), (("torch", "2.11"),)

# --- Forming ---


def test_the_first_hosts_in_order_of_registration_get_the_slots() -> None:
    job = Job()
    job.join(2)
    job.join(0)
    assert job.state.view is None
    job.join(7)
    assert (job.view.generation, job.view.phase) == (1, Phase.FORMING)
    assert job.view.slots == ("m2", "m0", "m7")
    assert job.view.holders == ((1,), (2,), (0,))


def test_node_rank_fixes_the_slot() -> None:
    job = Job()
    for index, node_rank in ((0, 2), (1, 0), (2, 1)):
        job.join(index, node_rank=node_rank)
    assert job.view.slots == ("m1", "m2", "m0")


def test_a_host_meant_as_a_spare_steps_in_for_one_that_never_comes() -> None:
    job = Job()
    for index, node_rank in ((0, 0), (1, 1), (3, 3)):
        job.join(index, node_rank=node_rank)
    assert job.state.view is None
    job.tick(60)
    assert job.view.slots == ("m0", "m1", "m3")


def test_too_few_hosts_end_the_job_with_code_3() -> None:
    job = Job()
    job.join(0)
    job.tick(60)
    assert job.exit_code == 3
    assert "1 of 3 hosts" in job.view.reason


def test_training_begins_when_every_slot_has_snapshot_0() -> None:
    job = Job()
    for index in range(3):
        job.join(index)
    job.ack(0, 1)
    assert job.published == []
    job.ack(2)
    assert job.view.phase is Phase.RUNNING
    assert job.view.rollback == Name(step=0, generation=1)


def test_a_checkpoint_found_at_the_start_is_what_the_job_forms_from() -> None:
    job = Job()
    job.feed(CheckpointFound(name=FIVE, now_s=0.0))
    for index in range(3):
        job.join(index)
    assert (job.view.source, job.view.rollback) == (Source.CHECKPOINT, FIVE)
    job.ack(0, 1, 2)
    assert (job.view.phase, job.view.rollback) == (Phase.RUNNING, FIVE)


def test_a_host_lost_while_forming_restarts_all_workers_in_a_new_generation() -> None:
    job = Job()
    for index in range(4):
        job.join(index)
    job.lose(1)
    assert (job.view.generation, job.view.phase) == (2, Phase.FORMING)
    assert job.view.slots == ("m0", "m3", "m2")


def test_forming_without_a_spare_waits_for_one() -> None:
    job = Job()
    for index in range(3):
        job.join(index)
    job.lose(1)
    assert (job.view.phase, job.view.rollback) == (Phase.STALLED, None)
    job.join(3)
    assert (job.view.generation, job.view.phase) == (3, Phase.FORMING)
    assert job.view.slots == ("m0", "m3", "m2")


def test_workers_that_die_while_forming_again_and_again_end_the_job() -> None:
    job = Job()
    for index in range(3):
        job.join(index)
    for _ in range(2):
        job.fault(FaultKind.WORKER_EXIT, 1, step=0, detail="exit code 1")
        assert job.view.phase is Phase.FORMING
        assert job.view.slots == ("m0", "m1", "m2")
    job.fault(FaultKind.WORKER_EXIT, 1, step=0, detail="exit code 1")
    assert job.exit_code == 1


def test_one_stale_host_that_is_first_turns_nobody_away_and_is_turned_away_itself() -> None:
    job = Job()
    job.join(0, versions=STALE)
    job.join(1, versions=GOOD)
    assert job.fenced == {}
    job.join(2, versions=GOOD)
    assert job.fenced == {"m0": True}
    (fence,) = (effect for effect in job.effects if isinstance(effect, Fence))
    assert fence.reason == "Host h0 has torch 2.12, host h1 has torch 2.13: every host needs the same."
    job.join(3, versions=GOOD)
    assert job.view.slots == ("m1", "m2", "m3")


def test_a_stale_host_that_comes_later_is_turned_away() -> None:
    job = Job()
    job.join(0, versions=GOOD)
    job.join(1, versions=STALE)
    job.join(2, versions=GOOD)
    assert job.fenced == {"m1": True}
    job.join(3, versions=STALE)
    assert job.fenced == {"m3": True}
    assert [member.id for member in job.state.members] == ["m0", "m2"]


def test_once_the_job_has_a_view_a_host_with_other_versions_is_turned_away_at_once() -> None:
    job = Job()
    for index in range(3):
        job.join(index, versions=GOOD)
    assert job.view.slots == ("m0", "m1", "m2")
    for index in (3, 4, 5, 6):
        job.join(index, versions=STALE)
        assert job.fenced == {f"m{index}": True}


def test_between_as_many_hosts_of_either_version_the_spares_decide() -> None:
    job = Job(slots=2, spares=1)
    job.join(0, versions=STALE)
    job.join(1, versions=GOOD)
    assert (job.fenced, job.published) == ({}, [])
    job.join(2, versions=GOOD)
    assert job.fenced == {"m0": True}
    assert job.view.slots == ("m1", "m2")


def test_two_stale_hosts_that_are_first_turn_nobody_away_while_the_others_are_still_to_come() -> None:
    job = Job(spares=3)
    for index, versions in enumerate((STALE, STALE, GOOD, GOOD)):
        job.join(index, versions=versions)
        assert (job.fenced, job.published) == ({}, [])
    job.join(4, versions=GOOD)
    assert job.fenced == {"m0": True, "m1": True}
    assert job.view.slots == ("m2", "m3", "m4")
    job.join(5, versions=GOOD)
    assert job.fenced == {}
    assert [member.id for member in job.state.spares] == ["m5"]


def test_versions_are_settled_as_soon_as_the_hosts_to_come_can_change_nothing() -> None:
    job = Job(slots=4, spares=1)
    for index, versions in enumerate((STALE, GOOD, GOOD)):
        job.join(index, versions=versions)
    assert job.fenced == {}
    job.join(3, versions=GOOD)  # 3 to 1, and one host is to come
    assert job.fenced == {"m0": True}
    assert job.published == []
    job.join(4, versions=GOOD)
    assert job.view.slots == ("m1", "m2", "m3", "m4")


def test_if_hosts_never_come_what_most_have_is_right_when_the_time_is_up() -> None:
    job = Job(spares=3)
    for index, versions in enumerate((STALE, GOOD, ODD, GOOD)):
        job.join(index, versions=versions)
    job.tick(59)
    assert (job.fenced, job.published) == ({}, [])
    job.tick(1)
    assert job.fenced == {"m0": True, "m2": True}


def test_hosts_that_were_turned_away_do_not_come_in_by_number_later() -> None:
    job = Job(spares=1)
    for index, versions in enumerate((GOOD, STALE, GOOD, STALE)):
        job.join(index, versions=versions)
    assert job.fenced == {"m1": True, "m3": True}
    job.lose(2)
    for index in (4, 5, 6):
        job.join(index, versions=STALE)
        assert job.fenced == {f"m{index}": True}
    for index in (7, 8):
        job.join(index, versions=GOOD)
    assert job.view.slots == ("m0", "m7", "m8")


def test_nobody_is_held_to_versions_that_no_host_has_any_more() -> None:
    job = Job(slots=2)
    job.join(0, versions=STALE)
    job.join(1, versions=GOOD)
    assert job.fenced == {"m1": True}
    job.lose(0)
    for index in (2, 3):
        job.join(index, versions=GOOD)
    assert job.view.slots == ("m2", "m3")


def test_if_nothing_decides_between_versions_the_older_registration_does() -> None:
    job = Job(slots=2)
    job.join(0, versions=STALE)
    job.join(1, versions=GOOD)
    assert job.fenced == {"m1": True}
    job.join(2, versions=STALE)
    assert job.view.slots == ("m0", "m2")


def test_spares_that_never_come_decide_nothing_once_the_time_is_up() -> None:
    job = Job(slots=2, spares=1)
    job.join(0, versions=STALE)
    job.join(1, versions=GOOD)
    job.tick(59)
    assert (job.fenced, job.published) == ({}, [])
    job.tick(1)
    assert job.fenced == {"m1": True}
    assert job.published == []
    job.tick(0.1)
    assert job.exit_code == 3
    assert "Only 1 of 2 hosts registered" in job.view.reason


def test_a_new_leader_before_the_first_view_holds_nobody_to_the_first_host() -> None:
    job = Job()
    members = [make_member(index, versions=STALE if index == 0 else GOOD) for index in range(4)]
    job.feed(LeaderElected(view=None, members=tuple(members[:2]), now_s=0.0))
    assert job.fenced == {}
    job.feed(LeaderElected(view=None, members=tuple(members), now_s=0.0))
    assert job.fenced == {"m0": True}
    assert job.view.slots == ("m1", "m2", "m3")


def test_a_host_with_too_few_workers_is_not_admitted() -> None:
    job = Job(nproc=2)
    job.feed(MemberJoined(member=make_member(0, 1), now_s=0.0))
    assert job.fenced == {"m0": True}


# --- A host is lost ---


def test_a_lost_host_is_replaced_by_a_spare() -> None:
    job = Job.running()
    job.lose(1)
    assert job.published == [Phase.ABORTING]
    assert job.view == replace(
        job.view, generation=2, slots=("m0", "m3", "m2"), joining=("m3",), leaving=(), rollback=None
    )
    job.ack(0, 2)
    assert (job.view.phase, job.view.rollback) == (Phase.RESTORING, FIVE)
    job.ack(0, 2)
    assert job.published == []
    job.ack(3)
    assert job.view.phase is Phase.RUNNING
    assert (job.view.generation, job.view.joining, job.view.rollback) == (2, (), FIVE)


def test_rank_0s_host_is_replaced_like_any_other() -> None:
    job = Job.running()
    job.lose(0)
    assert job.view.slots == ("m3", "m1", "m2")
    assert job.view.rendezvous == "m1"


def test_every_view_gives_a_reason() -> None:
    job = Job.running()
    job.lose(1)
    assert job.view.reason == "Host h1 (rank 1) is lost: its lease expired (lease_ttl_s)."


def test_two_silent_observers_are_needed_for_a_death_and_one_is_not_enough() -> None:
    job = Job.running()
    job.silence(1, 0)
    job.silence(1, 0, 1)
    assert job.view.phase is Phase.RUNNING
    job.silence(1, 0, 2)
    assert job.view.slots == ("m0", "m3", "m2")
    assert job.fenced == {"m1": False}


def test_a_view_is_published_before_anybody_is_fenced() -> None:
    job = Job.running()
    job.silence(1, 0, 2)
    assert [type(effect) for effect in job.effects] == [PublishView, Fence]


def test_two_hosts_lost_at_once_use_two_generations() -> None:
    job = Job.running(spares=2)
    job.lose(0, 1)
    assert (job.view.generation, job.view.slots) == (3, ("m3", "m4", "m2"))


def test_the_loss_of_a_spare_changes_nothing_for_the_job() -> None:
    job = Job.running()
    job.lose(3)
    assert job.view.generation == 1
    assert job.state.spares == ()


def test_a_spare_that_comes_while_the_job_runs_is_pooled() -> None:
    job = Job.running(spares=0)
    job.join(8)
    assert job.effects == ()
    job.lose(0)
    assert job.view.slots == ("m8", "m1", "m2")


def test_a_spare_that_dies_while_joining_is_replaced_by_the_next() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0, 2)
    job.lose(3)
    assert (job.view.generation, job.view.phase) == (3, Phase.ABORTING)
    assert (job.view.slots, job.view.joining) == (("m0", "m4", "m2"), ("m4",))


@pytest.mark.parametrize("phase", [Phase.ABORTING, Phase.RESTORING])
def test_a_second_fault_during_a_recovery_opens_a_new_generation(phase: Phase) -> None:
    job = Job.running(spares=2)
    job.lose(1)
    if phase is Phase.RESTORING:
        job.ack(0, 2)
    job.lose(2)
    assert (job.view.generation, job.view.phase) == (3, Phase.ABORTING)
    assert job.view.slots == ("m0", "m3", "m4")
    assert set(job.view.joining) == {"m3", "m4"}


def test_acks_of_the_generation_before_do_not_count_in_the_next() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0)
    job.lose(3)
    job.ack(2)
    assert job.view.phase is Phase.ABORTING


def test_the_verdict_waits_for_the_acks() -> None:
    job = Job.running(spares=2)
    job.fault(FaultKind.WORKER_EXIT, 1)
    job.fault(FaultKind.WORKER_EXIT, 2)  # slot 1 and its holder: nothing is decided at the time of the fault
    job.ack(0, 3)
    assert job.view.phase is Phase.ABORTING
    job.ack(1, 2)
    assert (job.view.phase, job.view.rollback) == (Phase.RESTORING, FIVE)


def lose_a_slot_and_its_holder(job: Job) -> None:
    job.lose(1)
    job.lose(2)
    job.ack(0)


def nothing(index: int, generation: int) -> Acked:
    member = f"m{index}"
    ack = Ack(
        member=member,
        generation=generation,
        phase=Phase.ABORTING,
        inventory=Inventory(member=member),
    )
    return Acked(ack=ack, now_s=0.0)


def test_no_live_copy_and_no_checkpoint_end_the_job_with_code_4() -> None:
    job = Job.running(spares=2)
    lose_a_slot_and_its_holder(job)
    assert job.published == []  # host 3 has been joining before and is asked; host 4 never had anything
    job.feed(nothing(3, generation=3))
    assert (job.view.phase, job.exit_code) == (Phase.HALTED, 4)


def test_no_live_copy_falls_back_to_the_checkpoint() -> None:
    job = Job.running(spares=2)
    checkpoint = Name(step=3, generation=1)
    job.feed(CheckpointFound(name=checkpoint, now_s=0.0))
    lose_a_slot_and_its_holder(job)
    job.feed(nothing(3, generation=3))
    assert (job.view.phase, job.view.source, job.view.rollback) == (
        Phase.RESTORING,
        Source.CHECKPOINT,
        checkpoint,
    )


def test_a_joining_member_that_may_have_the_only_copy_gets_more_patience_and_is_then_dropped() -> None:
    job = Job.running(spares=2)
    lose_a_slot_and_its_holder(job)
    job.tick(50)
    assert job.published == []
    job.tick(60)
    assert job.fenced == {"m3": False}
    job.ack(0)
    job.feed(nothing(4, generation=4))
    assert job.exit_code == 4


def test_a_joining_member_that_holds_the_only_copy_saves_the_job() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0, 2)
    job.ack(3)  # it has fetched rank 1's copy ...
    job.lose(2)  # ... whose last other copy is lost now, before all have restored
    job.ack(0)
    assert job.view.phase is Phase.ABORTING
    job.ack(3)
    assert (job.view.phase, job.view.rollback) == (Phase.RESTORING, FIVE)


# --- No spare ---


def test_without_a_spare_the_job_stalls_with_the_rollback_fixed_and_goes_on_when_one_joins() -> None:
    job = Job.running(spares=0)
    job.lose(1)
    assert job.view.slots == ("m0", "", "m2")
    job.ack(0, 2)
    assert (job.view.phase, job.view.rollback) == (Phase.STALLED, FIVE)
    job.join(9)
    assert (job.view.generation, job.view.phase, job.view.rollback) == (2, Phase.RESTORING, FIVE)
    assert (job.view.slots, job.view.joining) == (("m0", "m9", "m2"), ("m9",))


def test_a_spare_that_joins_during_the_abort_fills_the_vacant_slot_when_it_is_over() -> None:
    job = Job.running(spares=0)
    job.lose(1)
    job.join(9)
    assert job.view.slots == ("m0", "", "m2")
    job.ack(0, 2)
    assert (job.view.phase, job.view.slots) == (Phase.RESTORING, ("m0", "m9", "m2"))


def test_a_stall_ends_with_code_3_when_no_spare_comes() -> None:
    job = Job.running(spares=0)
    job.lose(1)
    job.ack(0, 2)
    job.tick(100)
    assert (job.exit_code, job.view.exit_code) == (3, 3)
    assert "rank 1" in job.view.reason


def test_a_host_lost_while_stalled_leads_to_a_new_verdict() -> None:
    job = Job.running(spares=0)
    job.lose(1)
    job.ack(0, 2)
    job.lose(0)
    assert (job.view.generation, job.view.phase) == (3, Phase.ABORTING)
    assert job.view.slots == ("", "", "m2")
