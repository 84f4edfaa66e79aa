"""The keeper of a lease: renewal, deadline, enrolment anew, and the end. On every store."""

from __future__ import annotations

import threading

import pytest

from deadpool.errors import Fenced, MembershipError, StoreUnavailable
from deadpool.membership.lease import LeaseKeeper, boottime_s
from deadpool.membership.memory import MemoryServer, MemoryStore
from deadpool.membership.records import MemberGone, MemberPut, StoreReached
from deadpool.membership.registry import Registry
from deadpool.membership.store import Lease, LeaseId, MembershipStore
from tests.contract.membership.support import (
    EVENT_S,
    TOKEN,
    TTL_S,
    Backend,
    Recorder,
    make_member,
    make_view,
    put_claim,
    wait_until,
)

MEMBER = make_member(0)


class Enrolment:
    """Registers one member, and counts how often."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.calls: list[tuple[LeaseId, bool]] = []

    def __call__(self, lease: Lease, again: bool) -> None:
        self.calls.append((lease.id, again))
        if again:
            self.registry.register_again(MEMBER, lease, TOKEN, holds_slot=True)
        else:
            self.registry.register(MEMBER, lease, TOKEN)


def make_keeper(registry: Registry, on_lost: Recorder | None = None) -> tuple[LeaseKeeper, Enrolment]:
    enrolment = Enrolment(registry)
    keeper = LeaseKeeper(registry.store, TTL_S, enrol=enrolment, on_lost=on_lost or Recorder())
    return keeper, enrolment


def renew(keeper: LeaseKeeper) -> None:
    before_s = keeper.deadline_s
    keeper.renew_now()
    wait_until(lambda: keeper.deadline_s > before_s)


def publish(registry: Registry, slots: tuple[str, ...]) -> None:
    leader = make_member(3)
    lease = registry.store.lease_grant(60)
    registry.register(leader, lease, TOKEN)
    term = registry.campaign(leader.id, lease)
    assert term is not None
    assert registry.publish_view(make_view(2, slots), 0, term)


def test_a_kept_lease_outlives_one_that_is_not_kept(backend: Backend, registry: Registry) -> None:
    keeper, enrolment = make_keeper(registry)
    lease = keeper.start()
    registry.register(make_member(1), registry.store.lease_grant(TTL_S), TOKEN)

    give_up_s = boottime_s() + EVENT_S
    while make_member(1) in registry.members() and boottime_s() < give_up_s:
        renew(keeper)
        backend.pass_time(TTL_S / 4)

    assert registry.members() == (MEMBER,)
    assert enrolment.calls == [(lease.id, False)]
    assert not keeper.is_overdue
    wait_until(lambda: keeper.reaches_store)
    keeper.close()
    assert registry.members() == ()
    keeper.close()


def test_a_member_whose_lease_was_ended_enrols_again_under_the_same_incarnation(registry: Registry) -> None:
    publish(registry, (MEMBER.id,))
    keeper, enrolment = make_keeper(registry)
    first = keeper.start()
    seen = Recorder()
    registry.watch(seen)
    seen.wait_for(StoreReached)
    n_before = len(seen.events)

    registry.store.lease_revoke(first.id)

    seen.wait_for(MemberGone)
    put = seen.wait_for(MemberPut, after=n_before)
    assert put.member == MEMBER
    assert put.lease == keeper.lease.id != first.id
    assert enrolment.calls == [(first.id, False), (put.lease, True)]
    assert not keeper.is_overdue
    keeper.close()


def test_a_member_that_was_replaced_meanwhile_is_told_once_and_stays_away(registry: Registry) -> None:
    publish(registry, ("somebody-else",))
    lost = Recorder()
    keeper, _ = make_keeper(registry, lost)
    lease = keeper.start()

    registry.store.lease_revoke(lease.id)

    lost.wait_for(Fenced)
    assert MEMBER not in registry.members()
    keeper.close()
    assert len(lost.events) == 1


def test_a_refused_first_enrolment_leaves_no_lease_behind(registry: Registry) -> None:
    first, _ = make_keeper(registry)
    first.start()
    second, enrolment = make_keeper(registry)

    with pytest.raises(MembershipError, match="already registered"):
        second.start()

    ((lease, _),) = enrolment.calls
    assert registry.store.lease_keepalive(lease) == 0
    second.close()
    first.close()


def test_a_keeper_that_is_cut_off_becomes_overdue_and_recovers(backend: Backend, prefix: str) -> None:
    other, store = backend.open_store(), backend.open_store()
    registry = Registry(store, prefix.split("/")[2])
    watching = Registry(other, registry.job_id)
    put_claim(watching)
    publish(watching, (MEMBER.id,))
    seen = Recorder()
    watching.watch(seen)
    keeper, _ = make_keeper(registry)
    first = keeper.start()
    seen.wait_for(MemberPut, lambda put: put.member == MEMBER)

    backend.cut_off(store)
    backend.pass_time(TTL_S)
    seen.wait_for(MemberGone)
    wait_until(lambda: keeper.is_overdue)
    assert not keeper.reaches_store
    n_before = len(seen.events)
    backend.let_back(store)

    put = seen.wait_for(MemberPut, after=n_before)
    assert (put.member, put.lease) == (MEMBER, keeper.lease.id)
    assert keeper.lease.id != first.id
    keeper.close()
    assert MEMBER not in watching.members()


def test_closing_while_cut_off_ends_in_time_and_leaves_the_lease_to_run_out(
    backend: Backend, prefix: str
) -> None:
    store = backend.open_store()
    registry = Registry(store, prefix.split("/")[2])
    put_claim(registry)
    keeper, _ = make_keeper(registry)
    keeper.start()
    backend.cut_off(store)

    began_s = boottime_s()
    keeper.close()

    assert boottime_s() - began_s < 4.0


class SlowStore(MemoryStore):
    """A store whose answers to renewals take half a second on the keeper's clock."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.clock_s = 100.0
        self.renewed = threading.Event()
        self.fails = False

    def lease_keepalive(self, lease: LeaseId) -> float:
        sent_s = self.clock_s
        self.clock_s += 0.5
        if self.fails:
            raise StoreUnavailable("as the test wants it")
        remaining_s = super().lease_keepalive(lease)
        if sent_s > 100.0:
            self.renewed.set()
        return remaining_s


def test_the_deadline_counts_from_before_the_renewal_was_sent() -> None:
    store = SlowStore(MemoryServer())
    keeper = LeaseKeeper(
        store, 0.3, enrol=lambda lease, again: None, on_lost=Recorder(), clock=lambda: store.clock_s
    )
    keeper.start()
    assert keeper.deadline_s == 100.3
    assert store.renewed.wait(EVENT_S)
    keeper.close(revoke=False)

    sent_s = store.clock_s - 0.5
    assert keeper.deadline_s == pytest.approx(sent_s + 0.3)
    assert keeper.is_overdue
    assert not keeper.reaches_store


def test_an_enrolment_that_fails_for_want_of_the_store_is_tried_again_until_it_works() -> None:
    server = MemoryServer()
    store: MembershipStore = MemoryStore(server)
    attempts: list[bool] = []
    enrolled_again = threading.Event()

    def enrol(lease: Lease, again: bool) -> None:
        attempts.append(again)
        if again and len(attempts) < 4:
            raise StoreUnavailable("as the test wants it")
        if again:
            enrolled_again.set()

    keeper = LeaseKeeper(store, 0.3, enrol=enrol, on_lost=Recorder())
    first = keeper.start()
    server.advance(0.3)

    assert enrolled_again.wait(EVENT_S)
    assert attempts == [False, True, True, True]
    assert keeper.lease.id != first.id
    keeper.close()


def test_a_first_enrolment_that_the_store_is_too_busy_for_is_tried_again_with_the_same_lease() -> None:
    store: MembershipStore = MemoryStore(MemoryServer())
    leases: list[LeaseId] = []

    def enrol(lease: Lease, again: bool) -> None:
        leases.append(lease.id)
        if len(leases) < 3:
            raise StoreUnavailable("as the test wants it")

    keeper = LeaseKeeper(store, 30.0, enrol=enrol, on_lost=Recorder())
    keeper.start()
    assert leases == [keeper.lease.id] * 3
    keeper.close()


def test_a_member_that_the_store_has_lost_while_its_lease_is_good_enrols_again_when_told(
    registry: Registry,
) -> None:
    keeper = LeaseKeeper(registry.store, 30.0, enrol=Enrolment(registry), on_lost=Recorder())
    keeper.start()
    publish(registry, (MEMBER.id,))
    registry.store.delete(f"{registry.members_prefix}{MEMBER.id}")

    keeper.enrol_again()

    wait_until(lambda: MEMBER in registry.members())
    keeper.close()
