"""The leader's machine: faults of workers, links and agents."""

from __future__ import annotations

import pytest

from deadpool.core.membership import HostReadmitted
from deadpool.core.recovery import late_hosts, smallest_cover
from deadpool.core.types import (
    FaultKind,
    Phase,
)
from tests.unit.core.job import Job

# --- A worker is lost ---


@pytest.mark.parametrize(
    "kind", [FaultKind.WORKER_EXIT, FaultKind.WORKER_STUCK, FaultKind.ABORT_TIMEOUT, FaultKind.DEVICE]
)
def test_the_slot_of_a_lost_worker_moves_to_a_spare_and_its_host_stays_as_a_source(kind: FaultKind) -> None:
    job = Job.running()
    job.fault(kind, 1)
    assert (job.view.slots, job.view.leaving) == (("m0", "m3", "m2"), ("m1",))
    job.ack(0, 2)
    assert job.published == []
    job.ack(1)
    assert job.view.phase is Phase.RESTORING
    job.ack(0, 2, 3)
    assert job.view.leaving == ()
    assert job.fenced == {"m1": kind is FaultKind.DEVICE}


def test_the_hosts_for_which_a_phase_waits_are_known() -> None:
    job = Job.running()
    assert late_hosts(job.state) == ()
    job.fault(FaultKind.WORKER_EXIT, 1)
    job.ack(0)
    assert late_hosts(job.state) == ("h2", "h1")  # h1 has left its slot, and is a source
    job.ack(1, 2)
    job.ack(0, 2)
    assert (job.view.phase, late_hosts(job.state)) == (Phase.RESTORING, ("h3",))
    job.ack(3)
    assert (job.view.phase, late_hosts(job.state)) == (Phase.RUNNING, ())


def test_without_a_spare_the_worker_is_replaced_on_its_own_host() -> None:
    job = Job.running(spares=0)
    job.fault(FaultKind.WORKER_EXIT, 1)
    assert (job.view.slots, job.view.joining, job.view.leaving) == (("m0", "m1", "m2"), (), ())
    job.ack(0, 2)
    job.ack(1, lost=(1,))
    assert job.view.phase is Phase.RESTORING


def test_a_host_that_loses_its_worker_twice_at_one_step_is_not_trusted_a_third_time() -> None:
    job = Job.running(spares=0)
    job.fault(FaultKind.WORKER_EXIT, 1)
    job.fault(FaultKind.WORKER_EXIT, 1)
    assert (job.view.slots, job.view.leaving) == (("m0", "", "m2"), ("m1",))


def test_a_device_fault_never_stays_on_its_host() -> None:
    job = Job.running(spares=0)
    job.fault(FaultKind.DEVICE, 1)
    assert job.view.slots == ("m0", "", "m2")
    job.join(11, host="h1")  # the same host comes back
    job.ack(0, 1, 2)
    assert job.view.phase is Phase.STALLED


def test_a_user_error_gets_a_new_worker_on_the_same_host() -> None:
    job = Job.running()
    job.fault(FaultKind.USER_ERROR, 1, detail="Traceback\nValueError: bad")
    assert (job.view.phase, job.view.slots) == (Phase.ABORTING, ("m0", "m1", "m2"))
    job.ack(0, 2)
    job.ack(1, lost=(1,))
    assert job.view.phase is Phase.RESTORING


def test_the_same_user_error_at_the_same_step_ends_the_job_with_code_1() -> None:
    job = Job.running()
    for index in (1, 2):  # on whichever rank
        job.fault(FaultKind.USER_ERROR, index, detail=f"File {index}\nValueError: bad")
    assert job.exit_code == 1
    assert "ValueError: bad" in job.view.reason


def test_user_errors_at_other_steps_or_of_another_kind_are_not_the_same() -> None:
    job = Job.running()
    for at_step, line in ((6, "a"), (7, "a"), (6, "b")):
        job.fault(FaultKind.USER_ERROR, 1, step=at_step, detail=line)
    assert job.exit_code is None


def test_a_worker_that_dies_thrice_at_one_step_does_not_burn_all_spares() -> None:
    job = Job.running(spares=5)
    for _ in range(3):
        job.fault(FaultKind.WORKER_EXIT, int(job.view.slots[1][1:]))
    assert job.exit_code == 1


def test_a_worker_found_lost_in_an_abort_moves_its_slot_if_there_is_a_spare() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(2, lost=(2,))
    assert (job.view.generation, job.view.slots) == (3, ("m0", "m3", "m4"))
    assert job.view.leaving == ("m2",)


def test_a_worker_found_lost_in_an_abort_stays_where_it_is_without_a_spare() -> None:
    job = Job.running(spares=1)
    job.lose(1)
    job.ack(2, lost=(2,))
    job.ack(0)
    assert (job.view.generation, job.view.phase) == (2, Phase.RESTORING)


def test_a_spare_that_fails_is_quarantined_and_the_next_one_takes_its_place() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.fault(FaultKind.SPARE_FAILED, 3, detail="self-test failed")
    assert job.view.slots == ("m0", "m4", "m2")
    assert job.fenced == {"m3": True}
    job.join(13, host="h3")
    assert job.state.spares == ()


def test_a_pooled_spare_that_fails_its_self_test_is_never_chosen() -> None:
    job = Job.running(spares=2)
    job.fault(FaultKind.SPARE_FAILED, 3, generation=0)
    assert job.fenced == {"m3": True}
    job.lose(1)
    assert job.view.slots == ("m0", "m4", "m2")


@pytest.mark.parametrize("kind", [FaultKind.USER_ERROR, FaultKind.BAD_INPUT])
def test_a_script_that_fails_on_a_spare_alone_is_the_fault_of_the_spare(kind: FaultKind) -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0, 2)
    assert job.view.phase is Phase.RESTORING
    job.fault(kind, 3, detail="FileNotFoundError: a mount that only this host lacks")
    assert job.exit_code is None
    assert job.fenced == {"m3": True}
    assert job.view.slots == ("m0", "m4", "m2")


def test_a_host_that_the_operator_readmits_is_a_spare_again() -> None:
    job = Job.running(spares=1)
    job.fault(FaultKind.SPARE_FAILED, 3, generation=0)
    job.join(13, host="h3")
    job.feed(HostReadmitted(host="h3", now_s=job.now_s))
    assert [spare.id for spare in job.state.spares] == ["m13"]


# --- Collectives ---


def test_a_failed_collective_without_a_death_tries_the_same_members() -> None:
    job = Job.running()
    job.fault(FaultKind.COLLECTIVE, 1)
    assert job.view.phase is Phase.RUNNING
    job.tick(1.9)
    assert job.view.phase is Phase.RUNNING
    job.tick(0.2)
    assert (job.view.phase, job.view.slots) == (Phase.ABORTING, ("m0", "m1", "m2"))
    assert job.view.leaving == ()


def test_a_death_confirmed_in_time_explains_the_failed_collective() -> None:
    job = Job.running()
    job.fault(FaultKind.COLLECTIVE, 0)
    job.lose(1)
    job.tick(3)
    assert job.view.generation == 2


def test_if_it_comes_back_the_hosts_that_the_reports_point_at_are_replaced() -> None:
    job = Job.running()
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    job.ack(0, 1, 2)
    job.ack(0, 1, 2)
    job.fault(FaultKind.COLLECTIVE, 0, pairs=((0, 1),))
    job.fault(FaultKind.COLLECTIVE, 2, pairs=((2, 1),))
    job.tick(2)
    assert (job.view.slots, job.view.leaving) == (("m0", "m3", "m2"), ("m1",))


def test_a_link_that_heartbeats_find_dead_needs_no_second_try() -> None:
    job = Job.running()
    job.hears_nothing_of(1, 2)
    job.hears_nothing_of(2, 1)
    assert job.view.phase is Phase.RUNNING  # one observer each: no death
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    assert (job.view.slots, job.view.leaving) == (("m0", "m3", "m2"), ("m1",))
    assert "no link between h1 and h2" in job.view.reason


def test_a_link_that_is_back_when_collectives_fail_blames_nobody() -> None:
    job = Job.running()
    job.hears_nothing_of(1, 2)
    job.hears_nothing_of(1)
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    assert job.view.slots == ("m0", "m1", "m2")


def test_a_dead_link_to_a_spare_is_nobodys_fault_but_the_spare_is_the_last_to_be_chosen() -> None:
    job = Job.running(spares=2)
    job.hears_nothing_of(0, 3)
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    assert job.view.slots == ("m0", "m1", "m2")
    job.lose(1)
    assert job.view.slots == ("m0", "m4", "m2")


def test_without_a_spare_a_bad_link_is_tried_again() -> None:
    job = Job.running(spares=0)
    job.hears_nothing_of(1, 2)
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    assert (job.view.phase, job.view.slots) == (Phase.ABORTING, ("m0", "m1", "m2"))


def test_ranks_that_all_wait_are_a_failure_only_if_a_link_between_them_is_dead() -> None:
    job = Job.running()
    job.all_wait()
    job.tick(3)
    assert job.view.phase is Phase.RUNNING
    job.hears_nothing_of(2, 0)
    job.all_wait()
    job.tick(2)
    assert job.view.slots == ("m3", "m1", "m2")


def test_ranks_that_waited_in_an_older_generation_are_no_news() -> None:
    job = Job.running()
    job.hears_nothing_of(2, 0)
    job.all_wait(generation=0)
    job.tick(3)
    assert job.view.generation == 1


def test_collectives_that_fail_at_one_step_for_ever_end_the_job() -> None:
    job = Job.running()
    for _ in range(3):
        job.fault(FaultKind.COLLECTIVE, 0)
        job.tick(2)
        assert job.view.phase is Phase.ABORTING
        job.ack(0, 1, 2)
        job.ack(0, 1, 2)
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    assert job.exit_code == 1


@pytest.mark.parametrize(
    ("pairs", "cover"),
    [
        ((), ()),
        (((0, 1),), (1,)),
        (((0, 1), (2, 1), (3, 1)), (1,)),
        (((1, 0), (1, 2), (1, 3)), (1,)),
        (((0, 1), (2, 3)), (1, 3)),
        (((2, 2),), ()),
    ],
)
def test_few_hosts_cover_all_pairs(pairs: tuple[tuple[int, int], ...], cover: tuple[int, ...]) -> None:
    assert smallest_cover(pairs) == cover


def test_what_a_leaving_host_reports_does_not_hit_the_host_in_its_place() -> None:
    job = Job.running(spares=2)
    job.fault(FaultKind.WORKER_EXIT, 1)
    assert (job.view.slots, job.view.leaving) == (("m0", "m3", "m2"), ("m1",))
    job.fault(FaultKind.WORKER_EXIT, 1, ranks=(1,), detail="its other worker ends, too")
    assert job.published == []
    job.fault(FaultKind.WORKER_EXIT, 3, ranks=(1,))
    assert job.view.slots == ("m0", "m4", "m2")


# --- Deadlines ---


def test_an_agent_that_seems_to_hold_the_only_copy_gets_more_patience_and_is_then_dropped() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0)  # rank 1's copy is on host 2
    job.tick(50)
    assert job.published == []
    job.tick(59)
    assert job.published == []
    job.tick(1)
    assert (job.view.generation, job.view.slots) == (3, ("m0", "m3", "m4"))
    assert job.fenced == {"m2": False}


def test_an_agent_whose_copies_exist_elsewhere_gets_no_more_patience() -> None:
    job = Job.running(spares=2)
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    job.ack(0, 2)
    job.tick(50)
    assert (job.view.generation, job.view.slots) == (3, ("m0", "m3", "m2"))


def test_a_joining_host_that_does_not_restore_in_time_is_quarantined() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0, 2)
    job.ack(0, 2)
    job.tick(40)
    assert (job.view.generation, job.view.slots) == (3, ("m0", "m4", "m2"))
    assert job.fenced == {"m3": True}


def test_a_large_state_has_the_time_that_its_survivors_ask_for() -> None:
    job = Job.running(spares=2)
    job.lose(1)
    job.ack(0, restore_extra_s=7)
    job.ack(2, restore_extra_s=90)
    assert job.view.phase is Phase.RESTORING
    job.tick(129)
    assert job.published == []
    job.tick(1)
    assert job.fenced == {"m3": True}
    assert "did not restore within 130 s" in job.view.reason


def test_survivors_that_do_not_restore_in_time_are_tried_again_before_they_are_replaced() -> None:
    job = Job.running(spares=1)
    job.fault(FaultKind.COLLECTIVE, 0)
    job.tick(2)
    for generation in (2, 3, 4):
        assert (job.view.generation, job.view.slots) == (generation, ("m0", "m1", "m2"))
        job.ack(0, 1, 2)
        job.ack(0, 1)
        job.tick(40)
    assert (job.view.generation, job.view.slots) == (5, ("m0", "m1", "m3"))


# --- Input that cannot be protected ---


def test_input_that_cannot_be_protected_ends_the_job_with_code_2() -> None:
    job = Job.running()
    job.fault(FaultKind.BAD_INPUT, 1, detail="data: a bare iterator cannot be restored")
    assert job.exit_code == 2
    assert "bare iterator" in job.view.reason
