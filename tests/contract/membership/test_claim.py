"""Claiming a job id: new, joined, refused or cleaned. On every store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import pytest

from deadpool.core.types import Ack, Phase
from deadpool.errors import ConfigError, StoreUnavailable
from deadpool.membership.claim import CLAIM_LIMIT_S, claim_job
from deadpool.membership.memory import MemoryServer, MemoryStore
from deadpool.membership.records import JobClaim
from deadpool.membership.registry import Registry
from deadpool.membership.store import Compare, KeyRange, KeyValue, Lease, Write
from tests.contract.membership.support import Backend, make_member, make_view, run_at_once

N_MEMBERS = 3
CLAIM_TTL_S = 2.0
without_waiting = pytest.mark.parametrize("backend", ["memory"], indirect=True)
"""For what differs between the stores in nothing but the time it takes."""


def make_claim(run_id: str = "", token: str = "secret") -> JobClaim:
    return JobClaim(run_id=run_id, token=token, n_members=N_MEMBERS, claimed_by="h0, process 1")


class Job:
    """A job under test, with agents that renew, or do not, as time passes."""

    def __init__(self, backend: Backend, registry: Registry) -> None:
        self.backend, self.registry = backend, registry
        self.leases: list[Lease] = []
        self.are_alive = True
        self.waited_s = 0.0
        self.on_pause: Callable[[], None] = lambda: None

    def start(self, n_members: int, phase: Phase | None = Phase.RUNNING) -> None:
        self.claim(make_claim("first"))
        for number in range(n_members):
            self.leases.append(self.registry.store.lease_grant(CLAIM_TTL_S))
            self.registry.register(make_member(number), self.leases[-1], "secret")
        if phase is not None:
            term = self.registry.campaign(make_member(0).id, self.leases[0])
            assert term is not None
            assert self.registry.publish_view(make_view(5, (make_member(0).id,), phase=phase), 0, term)
            self.registry.put_ack(Ack(member=make_member(0).id, generation=5, phase=phase))

    def kill(self) -> None:
        """Its agents renew no more."""
        self.are_alive = False

    def end_leases(self) -> None:
        for lease in self.leases:
            self.registry.store.lease_revoke(lease.id)

    def claim(self, claim: JobClaim) -> JobClaim:
        self.waited_s = 0.0
        return claim_job(self.registry, claim, CLAIM_TTL_S, clock=self.backend.now_s, pause=self.pause)

    def pause(self, seconds: float) -> None:
        if self.are_alive:
            for lease in self.leases:
                self.registry.store.lease_keepalive(lease.id)
        self.on_pause()
        self.backend.pass_time(seconds)
        self.waited_s += seconds


@pytest.fixture
def job(backend: Backend, unclaimed_registry: Registry) -> Job:
    return Job(backend, unclaimed_registry)


def test_a_new_job_is_claimed_at_once(job: Job) -> None:
    assert job.claim(make_claim("first")) == make_claim("first")
    assert job.waited_s == 0


def test_agents_launched_together_find_one_claim_whoever_comes_first(backend: Backend, job: Job) -> None:
    found: list[JobClaim] = []

    def claim(number: int) -> Callable[[], None]:
        registry = Registry(backend.open_store(), job.registry.job_id)
        own = make_claim("first", token=f"secret {number}")
        return lambda: found.append(claim_job(registry, own, CLAIM_TTL_S, clock=backend.now_s))

    run_at_once([claim(number) for number in range(4)])

    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_late_agent_of_the_same_launch_joins_at_once(job: Job) -> None:
    job.start(N_MEMBERS)

    assert job.claim(make_claim("first", token="other")) == make_claim("first")
    assert job.waited_s == 0


def test_a_second_job_under_a_live_id_is_refused_and_changes_nothing(job: Job) -> None:
    job.start(N_MEMBERS)
    before, _ = job.registry.store.get_prefix(job.registry.prefix)

    with pytest.raises(ConfigError, match=r"live job \(3 of 3 members, started by h0, process 1\)"):
        job.claim(make_claim("second"))

    assert job.waited_s < CLAIM_TTL_S + 0.15
    assert job.registry.store.get_prefix(job.registry.prefix)[0] == before


@without_waiting
def test_without_a_run_id_a_further_agent_of_a_full_job_is_refused(job: Job) -> None:
    job.start(N_MEMBERS)

    with pytest.raises(ConfigError, match="3 of 3 members"):
        job.claim(make_claim(""))


@without_waiting
def test_without_a_run_id_an_agent_joins_a_live_job_that_lacks_a_member(job: Job) -> None:
    job.start(N_MEMBERS - 1)

    assert job.claim(make_claim()) == make_claim("first")


def test_without_a_run_id_an_agent_joins_a_job_that_still_gathers(job: Job) -> None:
    job.start(1, phase=None)

    assert job.claim(make_claim()) == make_claim("first")
    assert job.waited_s == 0


def test_leftovers_of_a_job_killed_just_now_are_cleaned_within_one_ttl(job: Job) -> None:
    job.start(N_MEMBERS)
    job.kill()

    assert job.claim(make_claim("second")) == make_claim("second")

    pairs, _ = job.registry.store.get_prefix(job.registry.prefix)
    assert [pair.key for pair in pairs] == [job.registry.job_key]
    assert job.waited_s <= CLAIM_TTL_S + 1.5  # and the rounding of what etcd tells


@without_waiting
def test_leftovers_are_cleaned_also_where_agents_have_no_run_id(job: Job) -> None:
    job.start(N_MEMBERS)
    job.kill()

    assert job.claim(make_claim("", token="new")) == make_claim("", token="new")
    assert job.registry.view() == (None, 0)


def test_leftovers_of_a_finished_job_are_cleaned_at_once(job: Job) -> None:
    job.start(N_MEMBERS, phase=Phase.FINISHED)
    job.end_leases()

    assert job.claim(make_claim("second")) == make_claim("second")
    assert job.waited_s == 0


def test_keys_without_a_claim_are_leftovers_too(job: Job) -> None:
    job.registry.put_recovery(1, {})

    assert job.claim(make_claim("first")) == make_claim("first")
    assert job.waited_s == 0
    assert job.registry.recoveries() == ()


@without_waiting
def test_members_that_outlive_their_erased_job_are_named(job: Job) -> None:
    job.start(1)
    job.registry.store.delete(job.registry.job_key)

    with pytest.raises(ConfigError, match="being erased"):
        job.claim(make_claim("second"))


@without_waiting
def test_a_live_job_whose_leases_all_ended_in_a_stall_of_etcd_is_not_taken_for_dead(job: Job) -> None:
    job.start(N_MEMBERS)
    job.end_leases()

    def come_back() -> None:
        if job.waited_s > CLAIM_TTL_S / 3 and not job.registry.members():
            job.leases = [job.registry.store.lease_grant(CLAIM_TTL_S)]
            job.registry.register_again(make_member(0), job.leases[0], "secret", holds_slot=True)

    job.on_pause = come_back

    with pytest.raises(ConfigError):
        job.claim(make_claim("second"))
    assert job.registry.view()[0] is not None


def test_of_several_agents_that_find_leftovers_one_cleans_and_none_deletes_the_new_claim(
    backend: Backend, job: Job
) -> None:
    job.start(N_MEMBERS, phase=Phase.FINISHED)
    job.end_leases()
    found: list[JobClaim] = []

    def claim(number: int) -> Callable[[], None]:
        registry = Registry(backend.open_store(), job.registry.job_id)
        own = make_claim("second", token=f"secret {number}")
        return lambda: found.append(
            claim_job(registry, own, CLAIM_TTL_S, clock=backend.now_s, pause=backend.pass_time)
        )

    run_at_once([claim(number) for number in range(3)])

    assert len(found) == 3
    assert len(set(found)) == 1
    pairs, _ = job.registry.store.get_prefix(job.registry.prefix)
    assert [pair.key for pair in pairs] == [job.registry.job_key]


class ComingBackStore(MemoryStore):
    """A store on which a member comes back just before the first transaction is applied."""

    def __init__(self, server: MemoryServer, key: str) -> None:
        super().__init__(server)
        self._key = key
        self._has_come_back = False

    def transaction(
        self, compares: Sequence[Compare], writes: Sequence[Write] = (), deletes: Sequence[KeyRange] = ()
    ) -> int | None:
        if not self._has_come_back:
            self._has_come_back = True
            self.put(self._key, b"", self.lease_grant(CLAIM_TTL_S).id)
        return super().transaction(compares, writes, deletes)


def test_a_member_that_comes_back_at_the_last_moment_saves_its_job() -> None:
    server = MemoryServer()
    job_id = "job"
    dead = Registry(MemoryStore(server), job_id)
    dead.store.put(dead.job_key, msgspec.json.encode(make_claim("first")))
    dead.put_recovery(1, {})
    registry = Registry(ComingBackStore(server, f"{dead.members_prefix}h0-1"), job_id)

    with pytest.raises(ConfigError, match="live job"):
        claim_job(
            registry, make_claim("second"), CLAIM_TTL_S, clock=lambda: server.now_s, pause=server.advance
        )

    assert dead.recoveries() == ({"generation": 1},)


class SlowStore(MemoryStore):
    """A store that does not answer in time until the test says so, whether it applies a write or not."""

    def __init__(
        self, server: MemoryServer, *, until_s: float, applies: bool = False, reads: bool = True
    ) -> None:
        super().__init__(server)
        self._until_s = until_s
        self._applies = applies
        self._reads = reads

    @property
    def _is_slow(self) -> bool:
        return self._server.now_s < self._until_s

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        if self._is_slow and not self._reads:
            raise StoreUnavailable("as the test wants it")
        return super().get_prefix(prefix)

    def transaction(
        self, compares: Sequence[Compare], writes: Sequence[Write] = (), deletes: Sequence[KeyRange] = ()
    ) -> int | None:
        if not self._is_slow:
            return super().transaction(compares, writes, deletes)
        if self._applies:
            super().transaction(compares, writes, deletes)
        raise StoreUnavailable("as the test wants it")


def _claim_slowly(server: MemoryServer, store: SlowStore, claim: JobClaim) -> JobClaim:
    return claim_job(
        Registry(store, "job"), claim, CLAIM_TTL_S, clock=lambda: server.now_s, pause=server.advance
    )


@pytest.mark.parametrize("run_id", ["", "first"])
@pytest.mark.parametrize("applies", [False, True], ids=["not applied", "answer lost"])
def test_a_claim_that_is_not_answered_in_time_is_tried_again_and_is_ours(applies: bool, run_id: str) -> None:
    server = MemoryServer()
    store = SlowStore(server, until_s=CLAIM_TTL_S / 2, applies=applies)

    assert _claim_slowly(server, store, make_claim(run_id)) == make_claim(run_id)

    held, _ = Registry(MemoryStore(server), "job").claim()
    assert held == make_claim(run_id)


def test_our_claim_whose_answer_was_lost_is_ours_although_others_have_filled_the_job() -> None:
    server = MemoryServer()
    others = Registry(MemoryStore(server), "job")
    ours = make_claim("", token="ours")

    class Filled(SlowStore):
        def transaction(
            self, compares: Sequence[Compare], writes: Sequence[Write] = (), deletes: Sequence[KeyRange] = ()
        ) -> int | None:
            try:
                return super().transaction(compares, writes, deletes)
            finally:
                for number in range(N_MEMBERS):
                    others.register(make_member(number), others.store.lease_grant(60.0), "ours")

    store = Filled(server, until_s=CLAIM_TTL_S / 2, applies=True)

    assert _claim_slowly(server, store, ours) == ours
    assert server.now_s < CLAIM_TTL_S / 2


def test_a_store_that_does_not_answer_for_a_whole_ttl_ends_the_claim() -> None:
    server = MemoryServer()
    store = SlowStore(server, until_s=10 * CLAIM_TTL_S, reads=False)

    with pytest.raises(StoreUnavailable):
        _claim_slowly(server, store, make_claim())

    assert CLAIM_TTL_S <= server.now_s < 2 * CLAIM_TTL_S


class FlappingStore(MemoryStore):
    """A store that fails once in every half TTL until the test says so."""

    def __init__(self, server: MemoryServer, *, until_s: float) -> None:
        super().__init__(server)
        self._until_s = until_s
        self._fails_at_s = 0.0
        self.failures = 0

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        if self._fails_at_s <= self._server.now_s < self._until_s:
            self._fails_at_s = self._server.now_s + CLAIM_TTL_S / 2
            self.failures += 1
            raise StoreUnavailable(f"failure {self.failures}")
        return super().get_prefix(prefix)


def _claim_leftovers(server: MemoryServer, store: FlappingStore) -> JobClaim:
    """Claim the id of a dead job: that takes looks for one TTL."""
    dead = Registry(MemoryStore(server), "job")
    dead.store.put(dead.job_key, msgspec.json.encode(make_claim("first")))
    dead.put_recovery(1, {})

    def pause(seconds: float) -> None:
        assert server.now_s < 2 * CLAIM_LIMIT_S, "it waits for ever"
        server.advance(seconds)

    registry = Registry(store, "job")
    return claim_job(registry, make_claim("second"), CLAIM_TTL_S, clock=lambda: server.now_s, pause=pause)


def test_a_store_that_fails_now_and_then_does_not_keep_the_claim_waiting_for_ever() -> None:
    server = MemoryServer()
    store = FlappingStore(server, until_s=float("inf"))

    with pytest.raises(StoreUnavailable) as caught:
        _claim_leftovers(server, store)

    assert str(caught.value) == f"failure {store.failures}"
    assert CLAIM_LIMIT_S <= server.now_s < CLAIM_LIMIT_S + CLAIM_TTL_S


def test_a_claim_that_is_tried_again_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    server = MemoryServer()
    store = FlappingStore(server, until_s=10 * CLAIM_TTL_S)

    assert _claim_leftovers(server, store) == make_claim("second")

    assert store.failures > 10
    (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "failure 1" in warning.getMessage()


def test_a_live_job_is_not_taken_for_dead_because_its_store_was_away() -> None:
    """Its leases end with the store; its agents have one TTL from the return on to enrol again."""
    server = MemoryServer()
    live = Registry(MemoryStore(server), "job")
    live.store.put(live.job_key, msgspec.json.encode(make_claim("first")))
    live.put_recovery(1, {})
    member = make_member(0)
    live.register(member, live.store.lease_grant(CLAIM_TTL_S), "secret")
    away_s = 0.75 * CLAIM_TTL_S

    class Away(SlowStore):
        looks = 0

        def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
            self.looks += 1
            if self.looks == 2:
                server.advance(away_s)
                raise StoreUnavailable("as the test wants it")
            return super().get_prefix(prefix)

    def pause(seconds: float) -> None:
        server.advance(seconds)
        if server.now_s > away_s + 0.9 * CLAIM_TTL_S and not live.members():
            live.register_again(member, live.store.lease_grant(CLAIM_TTL_S), "secret", holds_slot=False)

    registry = Registry(Away(server, until_s=0.0), "job")
    with pytest.raises(ConfigError, match="live job"):
        claim_job(registry, make_claim("second"), CLAIM_TTL_S, clock=lambda: server.now_s, pause=pause)

    assert live.recoveries() == ({"generation": 1},)
