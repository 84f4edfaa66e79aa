"""The records of a job: guards of their writes, events of their watch, and their end. On every store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from deadpool.core.types import Ack, Fault, FaultKind, Inventory, Name, Phase, RankCopies, ReplicatedGroup
from deadpool.errors import Fenced, LeaseLost, MembershipError, StoreUnavailable
from deadpool.membership.memory import MemoryServer, MemoryStore
from deadpool.membership.records import (
    AckPut,
    FaultPut,
    FinishedPut,
    LeaderGone,
    LeaderPut,
    MemberGone,
    MemberPut,
    Quarantine,
    QuarantinePut,
    StoreLost,
    StoreReached,
    ViewGone,
    ViewPut,
)
from deadpool.membership.registry import RECOVERIES_KEPT, Registry
from deadpool.membership.store import Compare, KeyRange, MembershipStore, Write
from tests.contract.membership.support import (
    MEMBERS,
    TOKEN,
    Backend,
    Recorder,
    enrol,
    lead,
    make_view,
    put_claim,
    run_at_once,
)


def test_members_are_listed_in_order_of_registration_not_of_name(registry: Registry) -> None:
    for number in (2, 0, 1):
        enrol(registry, number)

    assert registry.members() == (MEMBERS[2], MEMBERS[0], MEMBERS[1])


def test_a_member_id_registers_once(registry: Registry) -> None:
    lease = enrol(registry, 0)
    registry.register(MEMBERS[0], lease, TOKEN)  # the same again, as after an answer that was lost

    with pytest.raises(MembershipError, match="already registered"):
        enrol(registry, 0)


def test_a_host_that_comes_after_the_end_of_its_job_does_not_form_it_anew(registry: Registry) -> None:
    lease = enrol(registry, 0)
    registry.publish_view(make_view(1, (MEMBERS[0].id,), phase=Phase.FINISHED), 0, lead(registry, 0, lease))
    late = registry.store.lease_grant(60)  # it claimed while the job ran, and its workers are loading

    registry.store.lease_revoke(lease.id)
    assert registry.erase_if_last(TOKEN)

    with pytest.raises(Fenced, match="before this host had joined it; to run it again, start all its hosts"):
        registry.register(MEMBERS[1], late, TOKEN)
    put_claim(registry, token="of a new job")
    with pytest.raises(Fenced, match="before this host had joined it, and h0, process 1 has begun another"):
        registry.register(MEMBERS[1], late, TOKEN)
    assert registry.members() == ()


@pytest.mark.parametrize("holds_slot", [False, True], ids=["a spare", "an active host"])
def test_a_member_whose_job_ends_while_its_own_lease_has_ended_hears_that(
    registry: Registry, holds_slot: bool
) -> None:
    lease = registry.store.lease_grant(60)
    enrolled = f"while member {MEMBERS[1].id} had no lease"

    registry.erase()
    with pytest.raises(Fenced, match=f"{enrolled}; to run it again, start all its hosts"):
        registry.register_again(MEMBERS[1], lease, TOKEN, holds_slot=holds_slot)
    put_claim(registry, token="of a new job")
    with pytest.raises(Fenced, match=f"{enrolled}, and h0, process 1 has begun another"):
        registry.register_again(MEMBERS[1], lease, TOKEN, holds_slot=holds_slot)
    assert registry.members() == ()


def test_the_end_of_a_job_leaves_the_claim_of_the_next_one(registry: Registry) -> None:
    put_claim(registry, token="of a new job")

    assert not registry.erase_if_last(TOKEN)

    claim, _ = registry.claim()
    assert claim is not None and claim.token == "of a new job"


def test_of_racing_candidates_one_leads_and_the_others_see_it(registry: Registry) -> None:
    leases = [enrol(registry, number) for number in range(4)]
    terms: dict[int, int | None] = {}

    def campaign(number: int) -> Callable[[], None]:
        def run() -> None:
            terms[number] = registry.campaign(MEMBERS[number].id, leases[number])

        return run

    run_at_once([campaign(number) for number in range(4)])

    winners = [number for number, term in terms.items() if term is not None]
    assert len(winners) == 1
    assert registry.leader() == (MEMBERS[winners[0]].id, terms[winners[0]])
    assert registry.campaign(MEMBERS[winners[0]].id, leases[winners[0]]) == terms[winners[0]]


def test_leadership_ends_with_the_lease_and_a_later_term_is_greater(registry: Registry) -> None:
    first, second = enrol(registry, 0), enrol(registry, 1)
    first_term = lead(registry, 0, first)
    assert registry.campaign(MEMBERS[1].id, second) is None

    registry.store.lease_revoke(first.id)

    assert lead(registry, 1, second) > first_term


def test_a_member_that_is_not_registered_cannot_lead(registry: Registry) -> None:
    lease = registry.store.lease_grant(60)

    assert registry.campaign(MEMBERS[0].id, lease) is None
    assert registry.leader() is None


def test_a_view_is_published_only_over_the_one_it_was_decided_upon(registry: Registry) -> None:
    term = lead(registry, 0, enrol(registry, 0))
    assert registry.view() == (None, 0)

    first = registry.publish_view(make_view(1, ("a", "b")), 0, term)
    assert first is not None
    assert registry.publish_view(make_view(9, ("c",)), 0, term) is None
    second = registry.publish_view(make_view(2, ("a", "c")), first, term)
    assert second is not None
    assert registry.publish_view(make_view(9, ("c",)), first, term) is None

    assert registry.view() == (make_view(2, ("a", "c")), second)


def test_a_leader_that_lost_its_key_publishes_nothing_even_if_it_knows_the_revision(
    registry: Registry,
) -> None:
    first_lease, second_lease = enrol(registry, 0), enrol(registry, 1)
    first_term = lead(registry, 0, first_lease)
    revision = registry.publish_view(make_view(1, ("a",)), 0, first_term)
    assert revision is not None

    registry.store.lease_revoke(first_lease.id)
    assert registry.publish_view(make_view(2, ("b",)), revision, first_term) is None
    second_term = lead(registry, 1, second_lease)
    assert registry.publish_view(make_view(2, ("b",)), revision, first_term) is None

    assert registry.publish_view(make_view(2, ("c",)), revision, second_term) is not None
    assert registry.view()[0] == make_view(2, ("c",))


def test_of_racing_publications_under_one_term_one_is_accepted(registry: Registry) -> None:
    term = lead(registry, 0, enrol(registry, 0))
    accepted: list[int | None] = []

    def publish(generation: int) -> Callable[[], None]:
        return lambda: accepted.append(registry.publish_view(make_view(generation, ("a",)), 0, term))

    run_at_once([publish(generation) for generation in range(1, 5)])

    assert len([each for each in accepted if each is not None]) == 1


def test_records_come_back_as_they_were_put(registry: Registry) -> None:
    enrol(registry, 0)
    inventory = Inventory(
        member=MEMBERS[0].id,
        copies=(RankCopies(rank=1, own=(Name(step=7, generation=2),), held=(Name(step=6, generation=1),)),),
    )
    ack = Ack(
        member=MEMBERS[0].id,
        generation=3,
        phase=Phase.ABORTING,
        inventory=inventory,
        lost_ranks=(1,),
        last_step=8,
        seconds=(("fetch", 0.1),),
        groups=(ReplicatedGroup(ranks=(0, 1)),),
    )
    fault = Fault(
        kind=FaultKind.COLLECTIVE, member=MEMBERS[0].id, generation=3, ranks=(1,), pairs=((0, 1),), detail="é"
    )
    quarantine = Quarantine(host="h9", member="h9-1", reason="its self-test failed")

    registry.put_ack(ack)
    registry.put_fault(fault)
    registry.put_finished(MEMBERS[0].id, 3)
    registry.put_quarantine(quarantine)
    registry.put_recovery(3, {"cause": {"rank": 1}, "seconds": {"fetch": 0.25}})

    assert registry.acks(3) == (ack,)
    assert registry.faults(3) == (fault,)
    assert registry.finished(3) == (MEMBERS[0].id,)
    assert registry.quarantined() == (quarantine,)
    assert registry.readmit("h9")
    assert registry.quarantined() == ()
    assert not registry.readmit("h9")
    assert registry.recoveries() == ({"cause": {"rank": 1}, "seconds": {"fetch": 0.25}, "generation": 3},)
    assert [registry.acks(2), registry.faults(2), registry.finished(2)] == [(), (), ()]


def test_a_long_traceback_keeps_its_end(registry: Registry) -> None:
    enrol(registry, 0)
    detail = "frame\n" * 100_000 + "ValueError: the cause"

    registry.put_fault(Fault(kind=FaultKind.USER_ERROR, member=MEMBERS[0].id, generation=1, detail=detail))

    (fault,) = registry.faults(1)
    assert fault.detail.endswith("ValueError: the cause")
    assert len(fault.detail) < 20_000


def test_only_registered_members_report(registry: Registry) -> None:
    member_id = MEMBERS[0].id
    reports: list[Callable[[], None]] = [
        lambda: registry.put_ack(Ack(member=member_id, generation=1, phase=Phase.FORMING)),
        lambda: registry.put_fault(Fault(kind=FaultKind.DEVICE, member=member_id, generation=1)),
        lambda: registry.put_finished(member_id, 1),
    ]
    for report in reports:
        with pytest.raises(LeaseLost, match=member_id):
            report()
    assert [pair.key for pair in registry.store.get_prefix(registry.prefix)[0]] == [registry.job_key]

    lease = enrol(registry, 0)
    for report in reports:
        report()
    registry.store.lease_revoke(lease.id)
    for report in reports:
        with pytest.raises(LeaseLost):
            report()


def test_evicting_a_dead_leader_frees_its_place_at_once(registry: Registry) -> None:
    lead(registry, 0, enrol(registry, 0))
    lease = enrol(registry, 1)

    assert registry.evict(MEMBERS[0].id)
    assert not registry.evict(MEMBERS[0].id)

    assert registry.members() == (MEMBERS[1],)
    lead(registry, 1, lease)


def test_clean_deletes_the_reports_of_older_generations_only(registry: Registry) -> None:
    enrol(registry, 0)
    for generation in (1, 9, 10, 11, 100):
        registry.put_ack(Ack(member=MEMBERS[0].id, generation=generation, phase=Phase.RESTORING))
        registry.put_fault(Fault(kind=FaultKind.DEVICE, member=MEMBERS[0].id, generation=generation))
        registry.put_finished(MEMBERS[0].id, generation)
        registry.put_recovery(generation, {"source": "replica"})

    registry.clean(before_generation=10)

    for read in (registry.acks, registry.faults, registry.finished):
        assert [len(read(generation)) for generation in (1, 9, 10, 11, 100)] == [0, 0, 1, 1, 1]
    assert [each["generation"] for each in registry.recoveries()] == [1, 9, 10, 11, 100]
    assert registry.members() == (MEMBERS[0],)


def test_summaries_of_recoveries_are_one_key_that_stays_small(
    store: MembershipStore, registry: Registry
) -> None:
    for generation in range(2, 2 + RECOVERIES_KEPT + 5):
        registry.put_recovery(generation, {"source": "replica"})
        registry.put_recovery(generation, {"source": "checkpoint"})  # told again, after a lost answer

    found = registry.recoveries()
    assert [each["generation"] for each in found] == list(range(7, 7 + RECOVERIES_KEPT))
    assert {each["source"] for each in found} == {"checkpoint"}
    assert len(store.get_prefix(registry.prefix)[0]) == 2  # and the claim


def test_the_last_member_erases_the_job_and_leaves_no_key(store: MembershipStore, registry: Registry) -> None:
    neighbour = Registry(store, registry.job_id + "0")
    put_claim(neighbour)
    enrol(neighbour, 3)
    first, last = enrol(registry, 0), enrol(registry, 1)
    term = lead(registry, 0, first)
    registry.publish_view(make_view(1, (MEMBERS[0].id,), phase=Phase.FINISHED), 0, term)
    registry.put_ack(Ack(member=MEMBERS[0].id, generation=1, phase=Phase.FORMING))
    registry.put_recovery(1, {})
    registry.fence(MEMBERS[2].id, "lost", term)

    store.lease_revoke(first.id)
    assert not registry.erase_if_last(TOKEN)
    assert registry.view()[0] is not None
    store.lease_revoke(last.id)
    assert registry.erase_if_last(TOKEN)

    assert store.get_prefix(registry.prefix)[0] == []
    assert neighbour.members() == (MEMBERS[3],)
    neighbour.erase()
    assert store.get_prefix(neighbour.prefix)[0] == []


def test_a_watch_tells_the_whole_story_in_order(backend: Backend, registry: Registry) -> None:
    lease = enrol(registry, 0)
    enrol(registry, 1)
    seen = Recorder()
    watching = Registry(backend.open_store(), registry.job_id)
    watching.watch(seen)
    seen.wait_for(StoreReached)

    term = lead(registry, 0, lease)
    view = make_view(1, (MEMBERS[0].id,))
    revision = registry.publish_view(view, 0, term)
    ack = Ack(member=MEMBERS[0].id, generation=1, phase=Phase.FORMING)
    fault = Fault(kind=FaultKind.WORKER_EXIT, member=MEMBERS[0].id, generation=1)
    quarantine = Quarantine(host="h2", member="h2-0", reason="as the test wants it")
    registry.put_ack(ack)
    registry.put_fault(fault)
    registry.put_finished(MEMBERS[0].id, 1)
    registry.put_quarantine(quarantine)
    registry.clean(2)
    registry.store.lease_revoke(lease.id)
    registry.erase()

    seen.wait_for(ViewGone)
    put = seen.events[0]
    assert put == MemberPut(member=MEMBERS[0], lease=lease.id)
    assert [type(each) for each in seen.events[1:3]] == [MemberPut, StoreReached]
    assert seen.events[3:9] == [
        LeaderPut(member_id=MEMBERS[0].id, term=term),
        ViewPut(view=view, revision=revision or 0),
        AckPut(ack=ack),
        FaultPut(fault=fault),
        FinishedPut(member_id=MEMBERS[0].id, generation=1),
        QuarantinePut(quarantine=quarantine),
    ]
    gone = [LeaderGone(), MemberGone(member_id=MEMBERS[0].id)]
    assert [each for each in seen.events[9:] if each in gone] in (gone, gone[::-1])


def test_a_watch_says_when_it_lost_and_reached_the_store_and_reports_a_lease_that_ended_meanwhile(
    backend: Backend, registry: Registry
) -> None:
    lease = enrol(registry, 0)
    watching_store = backend.open_store()
    seen = Recorder()
    Registry(watching_store, registry.job_id).watch(seen)
    seen.wait_for(StoreReached)

    backend.cut_off(watching_store)
    seen.wait_for(StoreLost)
    n_before = len(seen.events)
    gone = Recorder()
    registry.watch(gone)
    gone.wait_for(StoreReached)
    registry.store.lease_revoke(lease.id)
    gone.wait_for(MemberGone)
    backend.let_back(watching_store)

    seen.wait_for(StoreReached, after=n_before)
    assert seen.wait_for(MemberGone).member_id == MEMBERS[0].id


def test_a_record_of_another_version_is_left_out_and_named(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    enrol(registry, 0)
    registry.store.put(f"{registry.members_prefix}h7-1", b'{"id": 7}')
    registry.store.put(f"{registry.prefix}something-new/1", b"?")
    seen = Recorder()
    registry.watch(seen)
    seen.wait_for(StoreReached)

    assert registry.members() == (MEMBERS[0],)
    assert [type(each) for each in seen.events] == [MemberPut, StoreReached]
    assert "members/h7-1" in caplog.text
    registry.store.put(registry.view_key, b"{}")
    with pytest.raises(MembershipError, match="view cannot be read"):
        registry.view()


class LostAnswers(MemoryStore):
    """A store that answers no transaction, whether it applies it or not."""

    def __init__(self, server: MemoryServer, *, applies: bool) -> None:
        super().__init__(server)
        self.applies = applies

    def transaction(
        self, compares: Sequence[Compare], writes: Sequence[Write] = (), deletes: Sequence[KeyRange] = ()
    ) -> int | None:
        if self.applies:
            super().transaction(compares, writes, deletes)
        raise StoreUnavailable("as the test wants it")


def test_a_view_whose_acceptance_was_not_heard_is_not_published_twice_nor_given_up() -> None:
    server = MemoryServer()
    honest = Registry(MemoryStore(server), "job")
    put_claim(honest)
    lease = enrol(honest, 0)
    view = make_view(1, (MEMBERS[0].id,))
    applied = Registry(LostAnswers(server, applies=True), "job")
    ignored = Registry(LostAnswers(server, applies=False), "job")

    assert ignored.campaign(MEMBERS[0].id, lease) is None
    term = applied.campaign(MEMBERS[0].id, lease)
    assert term is not None
    assert honest.leader() == (MEMBERS[0].id, term)
    with pytest.raises(StoreUnavailable):
        ignored.publish_view(view, 0, term)
    revision = applied.publish_view(view, 0, term)

    assert honest.view() == (view, revision)
    with pytest.raises(StoreUnavailable):
        ignored.publish_view(view, revision or 0, term)  # the same View again is not taken for accepted
