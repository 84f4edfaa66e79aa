"""The leader's machine: which View follows which event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deadpool.core.membership import (
    Acked,
    CheckpointFound,
    Effect,
    End,
    Event,
    FaultReported,
    Fence,
    Finished,
    LeaderElected,
    LeaseExpired,
    Limits,
    MemberJoined,
    PublishView,
    SilenceConfirmed,
    State,
    StoreReturned,
    Tick,
    initial_state,
    step,
)
from deadpool.core.recovery import smallest_cover
from deadpool.core.types import (
    Ack,
    Fault,
    FaultKind,
    Inventory,
    Member,
    Name,
    Phase,
    RankCopies,
    Source,
    View,
)
from deadpool.testing.membership_world import make_member

LIMITS = Limits(
    lease_ttl_s=5, suspect_s=2, abort_s=50, restore_s=40, spare_wait_s=100, forming_s=60, only_copy_extra_s=60
)
FIVE = Name(step=5, generation=1)


class Job:
    """A job of three hosts of one rank, driven by events."""

    def __init__(self, *, slots: int = 3, nproc: int = 1) -> None:
        self.state: State = initial_state(LIMITS, slots, nproc)
        self.now_s = 0.0
        self.effects: tuple[Effect, ...] = ()
        self.feed(LeaderElected(view=None, members=(), now_s=0.0))

    @classmethod
    def running(cls, *, spares: int = 1, slots: int = 3) -> Job:
        job = cls(slots=slots)
        for index in range(slots + spares):
            job.join(index)
        job.ack(*range(slots))
        assert job.view.phase is Phase.RUNNING
        return job

    def feed(self, event: Event) -> None:
        self.state, self.effects = step(self.state, event)

    @property
    def view(self) -> View:
        assert self.state.view is not None
        return self.state.view

    @property
    def published(self) -> list[Phase]:
        return [effect.view.phase for effect in self.effects if isinstance(effect, PublishView)]

    @property
    def fenced(self) -> dict[str, bool]:
        return {effect.member_id: effect.quarantine for effect in self.effects if isinstance(effect, Fence)}

    @property
    def exit_code(self) -> int | None:
        return next((effect.exit_code for effect in self.effects if isinstance(effect, End)), None)

    def join(self, index: int, **more: object) -> None:
        self.feed(MemberJoined(member=make_member(index, self.state.nproc, **more), now_s=self.now_s))

    def lose(self, *indices: int) -> None:
        for index in indices:
            self.feed(LeaseExpired(member_id=f"m{index}", now_s=self.now_s))

    def silence(self, index: int, *observers: int) -> None:
        ids = tuple(f"m{observer}" for observer in observers)
        self.feed(SilenceConfirmed(member_id=f"m{index}", observers=ids, now_s=self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick(now_s=self.now_s))

    def fault(self, kind: FaultKind, index: int, *, step: int = 6, detail: str = "", **more: object) -> None:
        ranks = (self.view.slots.index(f"m{index}"),) if f"m{index}" in self.view.slots else ()
        fault = Fault(
            kind=kind,
            member=f"m{index}",
            generation=self.view.generation,
            ranks=ranks,
            step=step,
            detail=detail,
        )
        self.feed(FaultReported(fault=replace(fault, **more), now_s=self.now_s))  # type: ignore[arg-type]

    def ack(self, *indices: int, name: Name = FIVE, lost: tuple[int, ...] = ()) -> None:
        """Acks of the current phase; each host has its own copy of `name` and that of the slot before."""
        phase, generation = self.view.phase, self.view.generation
        for index in indices:
            inventory = None
            if phase is Phase.ABORTING:
                inventory = self.inventory(index, name)
            ack = Ack(
                member=f"m{index}",
                generation=generation,
                phase=phase,
                inventory=inventory,
                lost_ranks=lost,
                last_step=6,
            )
            self.feed(Acked(ack=ack, now_s=self.now_s))

    def inventory(self, index: int, name: Name) -> Inventory:
        member = f"m{index}"
        if member not in self.view.slots:  # leaving: it had slot `index`
            slot = index
        else:
            slot = self.view.slots.index(member)
        before = (slot - 1) % len(self.view.slots)
        copies = (RankCopies(rank=slot, own=(name,)), RankCopies(rank=before, held=(name,)))
        return Inventory(member=member, copies=tuple(sorted(copies, key=lambda c: c.rank)))


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


def test_a_host_with_other_versions_is_not_admitted() -> None:
    job = Job()
    job.join(0, versions=(("torch", "2.13"),))
    job.join(1, versions=(("torch", "2.12"),))
    assert job.fenced == {"m1": True}
    assert [member.id for member in job.state.members] == ["m0"]


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
    assert job.view.reason == "Host h1 is lost: its lease expired."


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


# --- Input that cannot be protected ---


def test_input_that_cannot_be_protected_ends_the_job_with_code_2() -> None:
    job = Job.running()
    job.fault(FaultKind.BAD_INPUT, 1, detail="data: a bare iterator cannot be restored")
    assert job.exit_code == 2
    assert "bare iterator" in job.view.reason


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
