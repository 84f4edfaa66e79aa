"""Who leads: elections, and a leader that loses the store or its key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deadpool.config import Config, JobConfig, MembershipConfig
from deadpool.core.types import Ack, MemberId, Name, Phase, Source
from deadpool.errors import SnapshotError
from deadpool.events import EventLog
from deadpool.membership.memory import MemoryStore
from deadpool.membership.records import LeaderGone, LeaderPut, RegistryEvent
from deadpool.membership.registry import Registry
from deadpool.runtime.leadership import Leadership, limits_of
from deadpool.runtime.messages import Silent
from deadpool.runtime.writer import RegistryWriter
from tests.unit.runtime.support import WAIT_S, Job, fail, open_log, read_events, wait_until


@dataclass
class Candidate:
    """One member, with its own connection to the store."""

    id: MemberId
    job: Job
    store: MemoryStore
    leadership: Leadership
    checkpoint: Name | None = None
    is_folder_silent: bool = False

    def find_checkpoint(self) -> Name | None:
        if self.is_folder_silent:
            raise SnapshotError("it does not answer")
        return self.checkpoint

    def leads(self) -> bool:
        return self.leadership.leader is not None

    def tick(self) -> None:
        self.leadership.tick(self.job.leases[self.id])

    def tick_until_leading(self) -> None:
        def is_leading() -> bool:
            self.tick()
            return self.leads()

        wait_until(is_leading, f"{self.id} leads")

    def hears(self, event: RegistryEvent) -> None:
        """What its watch of the registry says."""
        match event:
            case LeaderPut(member_id=member, term=term):
                self.leadership.on_leader(member, term)
            case LeaderGone():
                self.leadership.on_vacant()


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def log(events: Path) -> Iterator[EventLog]:
    opened = open_log(events)
    yield opened
    opened.close()


@pytest.fixture
def writer() -> Iterator[RegistryWriter]:
    made = RegistryWriter(fail)
    yield made
    made.close()


@pytest.fixture
def job() -> Job:
    return Job("a", "b", "c")


def _candidate(id: MemberId, job: Job, writer: RegistryWriter, log: EventLog) -> Candidate:
    store = MemoryStore(job.server)
    registry = Registry(store, "job")
    config = Config(job=JobConfig(nnodes=2, spares=1))
    candidate = Candidate(
        id=id,
        job=job,
        store=store,
        leadership=Leadership(
            id,
            registry,
            writer,
            config,
            log,
            query_stall=lambda generation: None,
            find_checkpoint=lambda: candidate.find_checkpoint(),
        ),
    )
    return candidate


@pytest.fixture
def a(job: Job, writer: RegistryWriter, log: EventLog) -> Candidate:
    return _candidate("a", job, writer, log)


@pytest.fixture
def c(job: Job, writer: RegistryWriter, log: EventLog) -> Candidate:
    return _candidate("c", job, writer, log)


def _run(job: Job, leading: Candidate) -> None:
    """Let the job run."""
    for member in ("a", "b"):
        ack = Ack(member=member, generation=1, phase=Phase.FORMING)
        leading.leadership.act(lambda leader, ack=ack: leader.acked(ack))  # type: ignore[misc]
    assert job.view().phase is Phase.RUNNING


def _silent(observer: MemberId, *members: MemberId, gone: bool = False) -> Silent:
    silent = () if gone else members
    return Silent(observer=observer, generation=1, silent=silent, gone=members if gone else ())


def test_who_campaigns_first_leads_and_publishes(job: Job, a: Candidate, c: Candidate) -> None:
    a.tick()
    assert a.leads()
    assert job.view().slots == ("a", "b")
    c.tick()
    assert not c.leads()


def test_while_somebody_leads_nobody_campaigns(job: Job, a: Candidate, c: Candidate) -> None:
    a.tick()
    leader = job.registry.leader()
    assert leader is not None
    c.hears(LeaderPut(member_id="a", term=leader[1]))
    job.store.lease_revoke(job.leases["a"].id)  # its key is gone, and c has not heard of it
    c.tick()
    assert not c.leads()
    c.hears(LeaderGone())
    c.tick()
    assert c.leadership.leader is not None


def test_the_first_leader_begins_from_the_checkpoint_that_is_there(job: Job, a: Candidate) -> None:
    a.checkpoint = Name(step=40, generation=3)
    a.tick()
    assert (job.view().rollback, job.view().source) == (Name(step=40, generation=3), Source.CHECKPOINT)


def test_a_job_does_not_begin_anew_because_the_folder_of_its_checkpoints_is_silent(
    job: Job, a: Candidate
) -> None:
    a.checkpoint, a.is_folder_silent = Name(step=40, generation=3), True
    a.tick()
    assert not a.leads()
    assert job.registry.view()[0] is None
    a.is_folder_silent = False
    a.tick_until_leading()
    assert job.view().rollback == Name(step=40, generation=3)


def test_a_recovery_does_not_wait_for_a_silent_folder(job: Job, a: Candidate, c: Candidate) -> None:
    a.tick()
    _run(job, a)
    c.leadership.on_view(job.view())
    job.store.lease_revoke(job.leases["a"].id)
    c.is_folder_silent = True
    c.tick()
    assert c.leads()


def test_a_leader_that_loses_the_store_stops_and_leads_again_when_it_is_back(
    job: Job, a: Candidate, events: Path
) -> None:
    a.tick()
    _run(job, a)
    a.store.set_reachable(False)
    a.leadership.on_silent(_silent("a", "b", gone=True))
    assert not a.leads()
    assert job.view().phase is Phase.RUNNING
    a.tick()
    assert not a.leads()
    a.store.set_reachable(True)
    a.tick_until_leading()
    assert job.view().phase is Phase.RUNNING  # decided anew from the store: nobody has told it of b yet
    a.leadership.on_silent(_silent("a", "b", gone=True))
    assert job.view().slots == ("a", "c")
    names = [event["event"] for event in read_events(events) if event["event"].startswith("leader.")]
    assert names == ["leader.elected", "leader.lost", "leader.elected"]


def test_a_leader_whose_key_names_another_member_stops(job: Job, a: Candidate, c: Candidate) -> None:
    a.tick()
    job.store.lease_revoke(job.leases["a"].id)
    c.tick()
    assert c.leadership.leader is not None
    a.hears(LeaderPut(member_id="c", term=c.leadership.leader.term))
    assert not a.leads()
    assert a.leadership.leader_id == "c"


def test_the_word_of_its_own_election_does_not_unseat_a_leader(a: Candidate) -> None:
    a.tick()
    leader = a.leadership.leader
    assert leader is not None
    a.hears(LeaderPut(member_id="a", term=leader.term))
    assert a.leadership.leader is leader


def test_a_leader_whose_key_is_gone_stops(job: Job, a: Candidate) -> None:
    a.tick()
    a.hears(LeaderGone())
    assert not a.leads()
    assert a.leadership.leader_id == ""


def test_of_two_leaders_the_one_before_writes_nothing(job: Job, a: Candidate, c: Candidate) -> None:
    a.tick()
    _run(job, a)
    job.store.lease_revoke(job.leases["a"].id)
    c.tick()
    assert a.leads()  # it has not heard of it
    a.leadership.on_silent(_silent("a", "b", gone=True))
    assert not a.leads()
    assert job.view().generation == 1


def test_of_two_leaders_the_one_before_fences_nobody_whom_the_new_view_holds(
    job: Job, a: Candidate, c: Candidate, events: Path
) -> None:
    a.tick()
    _run(job, a)
    job.store.lease_revoke(job.leases["a"].id)
    c.tick()
    c.leadership.on_silent(_silent("c", "a", gone=True))
    assert job.view().slots == ("c", "b")
    assert a.leads()  # it has not heard of it, and takes c for a spare
    a.leadership.on_silent(_silent("b", "c", gone=True))
    assert not a.leads()
    assert [member.id for member in job.registry.members()] == ["b", "c"]
    assert c.leads()
    lost = read_events(events, "leader.lost")
    assert "member c was not fenced" in lost[-1]["reason"]


@pytest.mark.parametrize(
    "observations",
    [
        [_silent("c", "a", gone=True)],
        [_silent("b", "a"), _silent("c", "a")],
        [_silent("b", "a"), _silent("b"), _silent("c", "a"), _silent("b", "a")],
    ],
)
def test_a_leader_that_others_find_dead_loses_its_lease_by_any_member(
    job: Job, a: Candidate, c: Candidate, observations: list[Silent]
) -> None:
    a.tick()
    leader = job.registry.leader()
    assert leader is not None
    c.hears(LeaderPut(member_id="a", term=leader[1]))
    vacant = threading.Event()
    watch = job.registry.watch(lambda event: vacant.set() if isinstance(event, LeaderGone) else None)
    for observation in observations[:-1]:
        c.leadership.on_silent(observation)
    assert job.registry.leader() is not None
    c.leadership.on_silent(observations[-1])
    assert vacant.wait(WAIT_S)
    watch.close()
    c.hears(LeaderGone())
    c.tick()
    assert c.leadership.leader is not None


def test_every_agent_knows_whom_the_newest_recovery_replaced(job: Job, a: Candidate, c: Candidate) -> None:
    a.tick()
    _run(job, a)
    running = job.view()
    for each in (a, c):
        each.leadership.on_view(running)
        assert each.leadership.replaced(running.slots) == ()
    a.leadership.on_silent(_silent("a", "b", gone=True))
    recovering = job.view()
    assert recovering.slots == ("a", "c")
    c.leadership.on_view(recovering)
    assert c.leadership.replaced(recovering.slots) == ("b",)  # the recovery goes on
    c.leadership.on_view(replace(recovering, phase=Phase.RUNNING))
    assert c.leadership.replaced(recovering.slots) == ("b",)  # it is over
    c.leadership.on_view(replace(recovering, phase=Phase.RUNNING))
    assert c.leadership.replaced(recovering.slots) == ("b",)


def test_one_observer_alone_does_not_evict_the_leader(
    job: Job, a: Candidate, c: Candidate, writer: RegistryWriter
) -> None:
    a.tick()
    leader = job.registry.leader()
    assert leader is not None
    c.hears(LeaderPut(member_id="a", term=leader[1]))
    c.leadership.on_silent(_silent("c", "a"))
    c.leadership.on_silent(_silent("c", "a"))
    c.leadership.on_silent(_silent("c", "b", gone=True))  # no leader, so not its business
    written = threading.Event()
    writer.put(1, "what is behind an eviction", written.set)
    assert written.wait(WAIT_S)
    assert job.registry.leader() == leader
    assert len(job.registry.members()) == 3


def test_the_limits_give_agents_longer_than_their_workers() -> None:
    config = Config(
        job=JobConfig(nnodes=2, spares=3),
        membership=MembershipConfig(lease_ttl_s=4.0, suspect_s=1.5, spare_wait_s=77.0),
    )
    limits, waits = limits_of(config), config.communicator
    assert limits.spares == 3
    assert (limits.lease_ttl_s, limits.suspect_s, limits.spare_wait_s) == (4.0, 1.5, 77.0)
    assert limits.abort_s > waits.close_timeout_s + waits.abort_timeout_s + waits.unwind_timeout_s
    assert limits.restore_s > waits.rebuild_timeout_s
