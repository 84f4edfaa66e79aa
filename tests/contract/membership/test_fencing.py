"""Who may enrol again, and who was fenced. On every store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deadpool.errors import Fenced, LeaseLost, MembershipError, StoreUnavailable
from deadpool.membership.memory import MemoryServer, MemoryStore
from deadpool.membership.records import Quarantine
from deadpool.membership.registry import Registry
from deadpool.membership.store import Compare, KeyRange, Write
from tests.contract.membership.support import MEMBERS, TOKEN, enrol, lead, make_view, put_claim


def test_a_member_that_the_view_lists_comes_back_with_a_new_lease(registry: Registry) -> None:
    slots = (MEMBERS[0].id, MEMBERS[1].id)
    registry.publish_view(make_view(1, slots), 0, lead(registry, 2, enrol(registry, 2)))
    old = enrol(registry, 0)
    registry.store.lease_revoke(old.id)
    assert MEMBERS[0] not in registry.members()

    registry.register_again(MEMBERS[0], registry.store.lease_grant(60), TOKEN, holds_slot=True)

    assert MEMBERS[0] in registry.members()


def test_a_member_that_was_replaced_does_not_come_back(registry: Registry) -> None:
    term = lead(registry, 2, enrol(registry, 2))
    registry.publish_view(make_view(2, (MEMBERS[1].id,)), 0, term)

    with pytest.raises(Fenced, match="generation 2: as the test wants it"):
        registry.register_again(MEMBERS[0], registry.store.lease_grant(60), TOKEN, holds_slot=True)

    assert MEMBERS[0] not in registry.members()
    registry.register_again(
        MEMBERS[3], registry.store.lease_grant(60), TOKEN, holds_slot=False
    )  # an idle spare may
    assert MEMBERS[3] in registry.members()


def test_a_member_whose_job_is_gone_does_not_come_back(registry: Registry) -> None:
    with pytest.raises(Fenced, match="no View"):
        registry.register_again(MEMBERS[0], registry.store.lease_grant(60), TOKEN, holds_slot=True)
    assert registry.members() == ()


def test_a_fenced_member_loses_lease_and_leadership_writes_nothing_and_never_enrols_again(
    registry: Registry,
) -> None:
    lease = enrol(registry, 0)
    term = lead(registry, 0, lease)
    revision = registry.publish_view(make_view(1, (MEMBERS[0].id,)), 0, term)
    assert revision is not None

    assert registry.fence(MEMBERS[0].id, "it did not answer", term, quarantine=True)
    assert not registry.fence(MEMBERS[0].id, "it did not answer", term, quarantine=True)

    assert registry.store.lease_keepalive(lease.id) == 0
    assert (registry.members(), registry.leader()) == ((), None)
    assert registry.quarantined() == (
        Quarantine(host="h0", member=MEMBERS[0].id, reason="it did not answer"),
    )
    assert registry.publish_view(make_view(2, (MEMBERS[0].id,)), revision, term) is None
    with pytest.raises(LeaseLost):
        registry.put_finished(MEMBERS[0].id, 1)
    with pytest.raises(MembershipError):
        enrol(registry, 0)
    for holds_slot in (False, True):
        with pytest.raises(Fenced, match="it did not answer"):
            registry.register_again(MEMBERS[0], registry.store.lease_grant(60), TOKEN, holds_slot=holds_slot)
    assert registry.members() == ()


def test_a_leader_that_was_succeeded_fences_and_quarantines_nobody(registry: Registry) -> None:
    first, second, third = (enrol(registry, number) for number in range(3))
    term = lead(registry, 0, first)
    registry.store.lease_revoke(first.id)  # as by an outage of the store; the leader has not heard of it
    assert not registry.fence(MEMBERS[2].id, "silent", term, quarantine=True), "none leads"
    lead(registry, 1, second)

    assert not registry.fence(MEMBERS[2].id, "silent", term, quarantine=True)

    assert registry.members() == (MEMBERS[1], MEMBERS[2])
    assert registry.quarantined() == ()
    assert registry.store.lease_keepalive(third.id) > 0
    registry.register_again(MEMBERS[2], third, TOKEN, holds_slot=False)


def test_a_fence_may_be_repeated(registry: Registry) -> None:
    term = lead(registry, 0, enrol(registry, 0))
    enrol(registry, 1)

    for _ in range(2):
        assert registry.fence(MEMBERS[1].id, "it did not answer", term)

    assert registry.members() == (MEMBERS[0],)
    with pytest.raises(Fenced, match="it did not answer"):
        registry.register_again(MEMBERS[1], registry.store.lease_grant(60), TOKEN, holds_slot=False)


class Enrolling(MemoryStore):
    """A store on which a member enrols again just before the first transaction is applied."""

    def __init__(self, server: MemoryServer, registry: Registry, number: int) -> None:
        super().__init__(server)
        lease = self.lease = self.lease_grant(60.0)
        self._enrol = [lambda: registry.register_again(MEMBERS[number], lease, TOKEN, holds_slot=False)]

    def transaction(
        self, compares: Sequence[Compare], writes: Sequence[Write] = (), deletes: Sequence[KeyRange] = ()
    ) -> int | None:
        if self._enrol:
            self._enrol.pop()()
        return super().transaction(compares, writes, deletes)


def test_a_member_that_enrols_again_while_it_is_fenced_is_out_all_the_same() -> None:
    server = MemoryServer()
    honest = Registry(MemoryStore(server), "job")
    put_claim(honest)
    term = lead(honest, 0, enrol(honest, 0))
    honest.store.lease_revoke(enrol(honest, 1).id)
    store = Enrolling(server, honest, 1)

    assert Registry(store, "job").fence(MEMBERS[1].id, "its lease expired", term)

    assert honest.members() == (MEMBERS[0],)
    with pytest.raises(Fenced, match="its lease expired"):
        honest.register_again(MEMBERS[1], store.lease, TOKEN, holds_slot=False)


class FirstAnswerLost(MemoryStore):
    """A store that applies the first transaction and does not answer it."""

    has_lost = False

    def transaction(
        self, compares: Sequence[Compare], writes: Sequence[Write] = (), deletes: Sequence[KeyRange] = ()
    ) -> int | None:
        revision = super().transaction(compares, writes, deletes)
        if not self.has_lost:
            self.has_lost = True
            raise StoreUnavailable("as the test wants it")
        return revision


def test_a_fence_whose_answer_was_lost_is_carried_out_to_its_end() -> None:
    server = MemoryServer()
    honest = Registry(MemoryStore(server), "job")
    put_claim(honest)
    term = lead(honest, 0, enrol(honest, 0))
    lease = enrol(honest, 1)

    assert Registry(FirstAnswerLost(server), "job").fence(MEMBERS[1].id, "silent", term)

    assert honest.members() == (MEMBERS[0],)
    assert honest.store.lease_keepalive(lease.id) == 0
