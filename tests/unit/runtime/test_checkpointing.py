"""The checkpoint tier of two hosts over one folder: complete or not there, and back bit for bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deadpool.core.types import Name
from deadpool.errors import ConfigError, LayoutMismatch, SnapshotError
from deadpool.events import EventLog
from deadpool.runtime import checkpointing
from deadpool.runtime.checkpointing import CheckpointCallbacks, CheckpointTier, checkpoint_root
from deadpool.runtime.once import OnceArea
from deadpool.store.checkpoint import Shard, complete_manifests, folder_of
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.segment import BankState, Segment
from tests.unit.runtime.support import LAYOUT, WAIT_S, Loop, fill, open_log, read_events, wait_until

FIVE = Name(step=5, generation=1)
NINE = Name(step=9, generation=1)
WORLD_SIZE = 2


def _once(layout_hash: str = "the layout") -> OnceArea:
    return OnceArea(
        record=b"record",
        layout=b"{}",
        layout_hash=layout_hash,
        blob_capacity=LAYOUT.blob_capacity,
        unique_bytes=LAYOUT.unique_bytes,
        replicated_bytes=LAYOUT.replicated_bytes,
        spans=[],
    )


@dataclass
class Host:
    """One host with one rank; its main thread is the test's."""

    rank: int
    store: HostMemoryStore
    loop: Loop
    may_write: bool = True
    storage: threading.Event = field(default_factory=threading.Event)  # unset: it hangs
    copied: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    written: list[tuple[Name, Shard]] = field(default_factory=list)
    completed: list[Name] = field(default_factory=list)
    tier: CheckpointTier = field(init=False)

    def open(self, root: Path, log: EventLog) -> None:
        self.storage.set()
        self.tier = CheckpointTier(
            root,
            self.store,
            WORLD_SIZE,
            log,
            post=self.loop.post,
            callbacks=CheckpointCallbacks(
                written=lambda name, shard: self.written.append((name, shard)),
                completed=self.completed.append,
                may_write=self._ask,
            ),
        )

    def _ask(self) -> bool:
        """Asked by a thread that has copied its bank and is about to write."""
        self.copied.release()
        return self.storage.wait(WAIT_S) and self.may_write

    def hang(self, *steps: int) -> None:
        """Periodic checkpoints of these steps, which the storage does not take."""
        self.storage.clear()
        for step in steps:
            fill(self.segment(), 0, Name(step=step, generation=1))
            self.tier.save_periodic([self.rank], Name(step=step, generation=1), step // 10)
            assert self.tier.problems or self.copied.acquire(timeout=WAIT_S)

    def load(self, name: Name, segment: Segment, bank: int, once: OnceArea | None = None) -> None:
        """Bring the rank's shard into a bank, as a fetch does."""
        segment.begin(bank, name)
        blob_len = self.tier.load(self.rank, name, segment, bank, once or _once())
        segment.complete(bank, blob_len=blob_len)

    def segment(self) -> Segment:
        segment = self.store.own(self.rank)
        assert segment is not None
        return segment


class Job:
    """Host 0 leads and collects the shards."""

    def __init__(self, root: Path, log: EventLog) -> None:
        self.root = root
        self.loop = Loop()
        self.hosts: list[Host] = []
        for rank in range(WORLD_SIZE):
            store = HostMemoryStore(f"host-{rank}")
            segment = store.create_own(rank, LAYOUT)
            segment.write_once(_once().encode())
            host = Host(rank, store, self.loop)
            host.open(root, log)
            self.hosts.append(host)

    @property
    def leader(self) -> Host:
        return self.hosts[0]

    def capture(self, name: Name) -> None:
        for host in self.hosts:
            fill(host.segment(), 0, name)

    def write_shards(self, name: Name) -> list[Shard]:
        """Each host writes its shard."""
        for host in self.hosts:
            host.tier.save([host.rank], name)
        self.loop.run_until(lambda: len(self._shards(name)) == WORLD_SIZE, "all shards")
        return self._shards(name)

    def save(self, name: Name) -> None:
        """A whole checkpoint."""
        self.capture(name)
        for shard in self.write_shards(name):
            self.leader.tier.shard_written(name, shard)
        self.loop.run_until(lambda: name in self.leader.completed, "the manifest")

    def _shards(self, name: Name) -> list[Shard]:
        return [shard for host in self.hosts for of, shard in host.written if of == name]


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def job(tmp_path: Path, events: Path) -> Iterator[Job]:
    log = open_log(events)
    made = Job(tmp_path / "checkpoints", log)
    yield made
    for host in made.hosts:
        host.tier.close()
        host.store.close()
    log.close()


def test_a_shard_whose_word_was_lost_is_said_again_and_the_checkpoint_completed_once(
    job: Job, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "REPEAT_S", 0.0)
    job.capture(FIVE)
    job.write_shards(FIVE)  # nobody heard of it
    for _ in range(3):
        for host in job.hosts:
            host.written.clear()
            host.tier.tick()
            for name, shard in host.written:
                job.leader.tier.shard_written(name, shard)
    job.loop.run_until(lambda: FIVE in job.leader.completed, "the manifest")
    assert [manifest.name for manifest in complete_manifests(job.root)] == [FIVE]
    assert len(read_events(events, "checkpoint.complete")) == 1
    job.leader.tier.tick()
    job.leader.written.clear()
    job.leader.tier.tick()
    assert not job.leader.written  # it is complete: nothing is left to say


def test_a_shard_is_not_said_for_ever(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "REPEAT_S", 0.0)
    job.capture(FIVE)
    job.write_shards(FIVE)
    other = job.hosts[1]
    other.written.clear()
    for _ in range(3 * checkpointing.REPEATS):
        other.tier.tick()
    assert len(other.written) == checkpointing.REPEATS


def _bank(segment: Segment, bank: int) -> tuple[bytes, bytes, bytes]:
    info = segment.bank_info(bank)
    return (
        bytes(segment.blob_view(bank)[: info.blob_len]),
        bytes(segment.unique_view(bank)),
        bytes(segment.replicated_view(bank)),
    )


def test_a_checkpoint_comes_back_bit_for_bit_in_another_process_life(job: Job, events: Path) -> None:
    job.save(FIVE)
    for host in job.hosts:
        saved = _bank(host.segment(), 0)
        fresh = HostMemoryStore("fresh")
        segment = fresh.create_own(host.rank, LAYOUT)
        host.load(FIVE, segment, 1)
        assert segment.bank_info(1).complete_name == FIVE
        assert _bank(segment, 1) == saved
        assert OnceArea.decode(host.tier.read_once(host.rank, FIVE)) == _once()
        fresh.close()
    names = [event["event"] for event in read_events(events)]
    assert names == ["checkpoint.written", "checkpoint.written", "checkpoint.complete"]


def test_a_checkpoint_is_complete_only_once_the_leader_knows_every_shard(job: Job) -> None:
    job.capture(FIVE)
    first, second = job.write_shards(FIVE)
    assert job.leader.tier.shard_written(FIVE, first) is False
    assert job.leader.tier.shard_written(FIVE, first) is False
    assert job.leader.tier.find() is None
    assert not job.leader.tier.is_durable(FIVE)
    assert job.leader.tier.shard_written(FIVE, second) is True
    job.loop.run_until(lambda: bool(job.leader.completed), "the manifest")
    assert job.leader.completed == [FIVE]
    assert job.leader.tier.is_durable(FIVE)
    assert not job.leader.tier.is_durable(NINE)


def test_shards_of_different_steps_make_no_checkpoint(job: Job) -> None:
    job.capture(FIVE)
    of_five = job.write_shards(FIVE)
    job.capture(NINE)
    of_nine = job.write_shards(NINE)
    assert job.leader.tier.shard_written(FIVE, of_five[0]) is False
    assert job.leader.tier.shard_written(NINE, of_nine[1]) is False
    assert job.leader.tier.find() is None


def test_a_step_is_written_once_however_often_it_is_asked_for(job: Job, events: Path) -> None:
    job.capture(FIVE)
    job.write_shards(FIVE)
    for host in job.hosts:
        host.tier.save([host.rank], FIVE)
        host.tier.close()
    assert len(read_events(events, "checkpoint.written")) == WORLD_SIZE


def test_the_newest_complete_checkpoint_is_found_and_none_is_loaded_in_the_place_of_another(job: Job) -> None:
    job.save(FIVE)
    job.save(NINE)
    assert job.hosts[1].tier.find() == NINE
    assert job.hosts[1].tier.is_durable(FIVE)
    twelve = Name(step=12, generation=1)
    assert not job.hosts[1].tier.is_durable(twelve)
    with pytest.raises(SnapshotError, match="step 12"):
        job.hosts[1].load(twelve, job.hosts[1].segment(), 1)


def test_a_folder_that_hangs_is_not_waited_for_and_heard_when_it_answers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe in the place of a manifest: who opens it waits for a writer."""
    monkeypatch.setattr(checkpointing, "FIND_S", 0.2)
    job.save(FIVE)
    hanging = folder_of(job.root, NINE)
    hanging.mkdir()
    os.mkfifo(hanging / "manifest.json")
    assert job.leader.tier.find() == FIVE  # it has completed it
    for _ in range(2):  # a job that began now would begin anew
        with pytest.raises(SnapshotError, match="it does not answer"):
            job.hosts[1].tier.find()
    assert not job.hosts[1].tier.is_durable(NINE)
    job.loop.run_posted()
    assert job.hosts[1].completed == []
    (hanging / "manifest.json").write_text("no manifest")  # both go on
    job.loop.run_until(lambda: job.hosts[1].completed == [FIVE], "the answer")
    assert job.leader.completed == [FIVE]


def test_a_look_that_takes_longer_than_it_is_waited_for_counts_the_next_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "DURABLE_S", 0.0)
    job.save(FIVE)
    wait_until(lambda: job.hosts[1].tier.is_durable(FIVE), "the answer of an earlier look")


def test_a_capture_may_overwrite_the_bank_as_soon_as_it_is_copied(job: Job) -> None:
    job.save(FIVE)
    expected = _bank(job.hosts[0].segment(), 0)
    job.capture(NINE)
    assert _bank(job.hosts[0].segment(), 0) != expected
    job.hosts[0].load(FIVE, job.hosts[0].segment(), 1)
    assert _bank(job.hosts[0].segment(), 1) == expected


def test_a_step_that_is_in_no_bank_writes_nothing(job: Job) -> None:
    job.capture(FIVE)
    job.leader.tier.save([0], NINE)
    job.leader.tier.close()
    job.loop.run_posted()
    assert job.leader.written == []
    assert not folder_of(job.root, NINE).exists()


def test_the_state_of_another_script_is_refused_and_no_bank_is_complete(job: Job) -> None:
    job.save(FIVE)
    segment = job.hosts[1].segment()
    with pytest.raises(LayoutMismatch, match="--checkpoint-dir"):
        job.hosts[1].load(FIVE, segment, 1, _once("another layout"))
    assert segment.bank_info(1).state is BankState.WRITING
    assert segment.bank_info(0).complete_name == FIVE


def test_a_shard_that_was_damaged_is_refused_and_its_bank_is_not_complete(job: Job) -> None:
    job.save(FIVE)
    path = folder_of(job.root, FIVE) / "rank-1.shard"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    segment = job.hosts[1].segment()
    with pytest.raises(SnapshotError):
        job.hosts[1].load(FIVE, segment, 1)
    assert segment.bank_info(1).state is BankState.WRITING


def test_while_the_storage_hangs_no_more_than_two_periodic_checkpoints_are_copied(job: Job) -> None:
    host = job.leader
    host.hang(10, 20, 30, 40, 50)
    (problem,) = host.tier.problems
    assert problem.startswith("checkpoint of step 40 is left out, steps 10 and 20 are still being written; ")
    host.storage.set()
    job.loop.run_until(lambda: len(host.written) == 2, "both that were begun")
    assert sorted(name.step for name, _ in host.written) == [10, 20]
    job.capture(Name(step=60, generation=1))
    host.tier.save_periodic([0], Name(step=60, generation=1), 6)  # not every fourth
    job.capture(Name(step=80, generation=1))
    host.tier.save_periodic([0], Name(step=80, generation=1), 8)
    job.loop.run_until(lambda: len(host.written) == 3, "the next")
    assert host.written[-1][0].step == 80


def test_the_last_resort_is_written_although_periodic_checkpoints_hang(job: Job) -> None:
    host = job.leader
    host.hang(10, 20)
    job.capture(NINE)
    host.tier.save([0], NINE)
    host.storage.set()
    job.loop.run_until(lambda: NINE in [name for name, _ in host.written], "the last resort")


def test_a_checkpoint_that_cannot_be_written_is_a_problem_until_one_is(job: Job) -> None:
    host = job.leader
    folder_of(job.root, FIVE).parent.mkdir(exist_ok=True)
    folder_of(job.root, FIVE).write_text("in the way")
    job.capture(FIVE)
    host.tier.save_periodic([0], FIVE, 1)
    job.loop.run_until(lambda: bool(host.tier.problems), "the problem")
    (problem,) = host.tier.problems
    assert problem.startswith("checkpoint of step 5 was not written by rank 0: ")
    folder_of(job.root, FIVE).unlink()
    host.tier.save_periodic([0], FIVE, 2)
    job.loop.run_until(lambda: bool(host.written), "the second try")
    assert host.tier.problems == ()


def test_a_host_whose_lease_has_run_out_writes_no_shard(job: Job) -> None:
    job.capture(FIVE)
    job.hosts[1].may_write = False
    for host in job.hosts:
        host.tier.save([host.rank], FIVE)
        host.tier.close()
    job.loop.run_posted()
    assert [len(host.written) for host in job.hosts] == [1, 0]
    assert [path.name for path in folder_of(job.root, FIVE).iterdir()] == ["rank-0.shard"]


def test_a_leader_whose_lease_has_run_out_completes_nothing(job: Job) -> None:
    job.capture(FIVE)
    shards = job.write_shards(FIVE)
    job.leader.may_write = False
    for shard in shards:
        job.leader.tier.shard_written(FIVE, shard)
    job.leader.tier.close()
    job.loop.run_posted()
    assert job.leader.completed == []
    assert complete_manifests(job.root) == ()


def test_a_checkpoint_that_the_leader_completed_is_durable_for_every_host(job: Job) -> None:
    job.save(FIVE)
    assert not job.hosts[1].tier.is_durable(NINE)
    job.save(NINE)
    assert job.hosts[1].tier.is_durable(NINE)


def test_the_folder_is_the_one_configured_or_in_the_run_folder(tmp_path: Path) -> None:
    configured = tmp_path / "here"
    assert checkpoint_root(str(configured), tmp_path / "run") == configured
    assert configured.is_dir()
    assert checkpoint_root("", tmp_path / "run") == tmp_path / "run" / "checkpoints"


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        checkpoint_root(str(tmp_path / "file" / "checkpoints"), tmp_path)
