"""What a host reports of its workers: at once, after a while, once, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from deadpool.config import Config
from deadpool.core.types import Fault, FaultKind
from deadpool.runtime import faults as faults_module
from deadpool.runtime.checkpointing import CheckpointCallbacks, CheckpointTier
from deadpool.runtime.faults import USER_ERROR_DELAY_S, FaultReports
from deadpool.runtime.fetch import Fetcher
from deadpool.runtime.messages import Raised
from deadpool.runtime.parts import HostParts
from deadpool.runtime.processes import PARKED_RANK, WorkerHandle
from deadpool.runtime.protection import Protection, ProtectionCallbacks
from deadpool.runtime.push import HolderPusher
from deadpool.runtime.workforce import Worker, Workforce, WorkforceCallbacks
from deadpool.runtime.writer import RegistryWriter
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.in_process import InProcessNetwork, InProcessTransport
from deadpool.store.replication import Replicator
from tests.unit.runtime.support import WAIT_S, Job, Loop, fail, open_log, wait_until

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: of the script'


def _ignore(*_: Any) -> None:
    pass


class Host:
    """One host's fault reports, over a registry in memory."""

    def __init__(self, folder: Path) -> None:
        self.job = Job("a")
        self.config = Config()
        self.folder = folder
        loop = Loop()
        self._transport = InProcessTransport(InProcessNetwork())
        self._memory = HostMemoryStore("a")
        self._log = open_log(folder / "events.jsonl")
        self._writer = RegistryWriter(fail)
        self._workforce = Workforce(
            self.config,
            folder,
            loop.post,
            WorkforceCallbacks(**{field.name: _ignore for field in fields(WorkforceCallbacks)}),
        )
        replicator = Replicator(
            self._memory, self._transport, address_of=lambda _: None, on_held=_ignore, on_failed=_ignore
        )
        protection = Protection(
            "a",
            self._memory,
            HolderPusher(replicator, _ignore),
            ProtectionCallbacks(
                send=_ignore,
                leader=lambda: "",
                tell_worker=_ignore,
                finished_step=lambda _: 0,
                committed=_ignore,
                refused=_ignore,
                failed=_ignore,
                unprotected=_ignore,
                held=_ignore,
            ),
        )
        checkpoints = CheckpointTier(
            folder / "checkpoints",
            self._memory,
            1,
            self._log,
            post=loop.post,
            callbacks=CheckpointCallbacks(written=_ignore, completed=_ignore, may_write=lambda: True),
        )
        parts = HostParts(
            config=self.config,
            run_dir=folder,
            registry=self.job.registry,
            writer=self._writer,
            store=self._memory,
            server=DataServer(self._memory, self._transport),
            workforce=self._workforce,
            protection=protection,
            fetcher=Fetcher(self._transport, self._memory, lambda: dict(self.job.members), loop.post),
            checkpoints=checkpoints,
            log=self._log,
            stop_streams=_ignore,
        )
        self.faults = FaultReports("a", parts)
        self.begin(1)

    def begin(self, generation: int) -> None:
        self.faults.begin(generation)
        self._writer.set_generation(generation)

    def reported(self, generation: int = 1) -> Fault | None:
        """The newest report that is in the registry, once all writes under way are done."""
        written = threading.Event()
        self._writer.put(1 << 40, "the end of the queue", written.set)
        assert written.wait(WAIT_S)
        return next(iter(self.job.registry.faults(generation)), None)

    def lost_worker(self, rank: int, *, finished_step: int = 0, killed_for: str = "") -> Worker:
        """The worker of a rank, whose process is gone."""
        handle = WorkerHandle(0, self.config, self.folder, _ignore, _ignore)
        handle.kill()
        assert handle.reap(WAIT_S)
        handle.rank = rank
        return Worker(handle=handle, finished_step=finished_step, killed_for=killed_for)

    def close(self) -> None:
        self._writer.close()
        self._workforce.stop_all(WAIT_S)
        self._transport.close()
        self._memory.close()
        self._log.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the user are due at once: only the order of events is looked at."""
    monkeypatch.setattr(faults_module, "USER_ERROR_DELAY_S", 0.0)


def _raised(
    *, generation: int = 1, step: int = 4, collective: bool = False, bad_input: bool = False
) -> Raised:
    return Raised(
        generation=generation,
        step=step,
        collective=collective,
        bad_input=bad_input,
        text="ValueError: of the script",
        traceback=TRACEBACK,
    )


def test_an_error_of_the_user_is_reported_only_after_a_death_would_be_known(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    host.faults.raised(0, _raised())
    host.faults.tick()
    assert host.reported() is None

    def is_reported() -> bool:
        host.faults.tick()
        return host.reported() is not None

    wait_until(is_reported, "the report")
    assert time.monotonic() - began_s >= USER_ERROR_DELAY_S
    fault = host.reported()
    assert fault == Fault(
        kind=FaultKind.USER_ERROR, member="a", generation=1, ranks=(0,), step=4, detail=TRACEBACK
    )
    assert capfd.readouterr().err.count("[rank 0] Traceback") == 1


@pytest.mark.usefixtures("no_delay")
def test_an_error_that_belongs_to_an_abort_is_dropped(host: Host) -> None:
    host.faults.raised(0, _raised())
    host.begin(2)
    host.faults.tick()
    assert host.reported(1) is None
    assert host.reported(2) is None


@pytest.mark.usefixtures("no_delay")
def test_an_error_of_an_older_generation_is_not_looked_at(host: Host) -> None:
    host.begin(2)
    host.faults.raised(0, _raised(generation=1))
    host.faults.raised(0, _raised(generation=1, collective=True))
    host.faults.tick()
    assert host.reported(2) is None


@pytest.mark.usefixtures("no_delay")
def test_an_error_before_the_first_step_is_reported_whatever_generation_it_began_in(host: Host) -> None:
    host.begin(2)
    host.faults.raised(0, _raised(generation=1, step=-1))
    host.faults.tick()
    fault = host.reported(2)
    assert fault is not None
    assert (fault.kind, fault.step) == (FaultKind.USER_ERROR, 0)


def test_a_failed_collective_is_reported_at_once_with_its_last_line(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    host.faults.raised(0, _raised(collective=True))
    fault = host.reported()
    assert fault is not None
    assert (fault.kind, fault.detail) == (FaultKind.COLLECTIVE, "ValueError: of the script")
    assert "Traceback" not in capfd.readouterr().err  # evidence of another's death, not an error to show


def test_bad_input_is_reported_at_once(host: Host) -> None:
    host.faults.raised(0, _raised(bad_input=True, step=-1))
    fault = host.reported()
    assert fault is not None
    assert (fault.kind, fault.ranks) == (FaultKind.BAD_INPUT, (0,))


def test_a_worker_that_raised_and_ended_is_an_error_of_the_user_and_reported_once(host: Host) -> None:
    host.faults.raised(0, _raised())
    host.faults.lost(host.lost_worker(0), "exited with code 1")
    fault = host.reported()
    assert fault is not None
    assert (fault.kind, fault.detail) == (FaultKind.USER_ERROR, TRACEBACK)
    host.faults.lost(host.lost_worker(0), "exited with code 1")
    assert host.reported() == fault


def test_a_worker_that_only_ended_is_lost_with_its_cause_and_step(host: Host) -> None:
    host.faults.lost(host.lost_worker(0, finished_step=6), "killed by signal 9")
    assert host.reported() == Fault(
        kind=FaultKind.WORKER_EXIT,
        member="a",
        generation=1,
        ranks=(0,),
        step=7,
        detail="worker of rank 0 killed by signal 9",
    )


def test_of_several_lost_workers_the_last_report_names_all(host: Host) -> None:
    host.faults.lost(host.lost_worker(3), "killed by signal 9")
    host.faults.lost(host.lost_worker(2), "killed by signal 9")
    fault = host.reported()
    assert fault is not None
    assert fault.ranks == (2, 3)
    host.begin(2)
    host.faults.lost(host.lost_worker(1), "killed by signal 9")
    later = host.reported(2)
    assert later is not None
    assert later.ranks == (1,)


def test_a_worker_that_its_agent_killed_missed_a_limit(host: Host) -> None:
    host.faults.lost(host.lost_worker(0, killed_for="did not unwind"), "did not unwind")
    fault = host.reported()
    assert fault is not None
    assert fault.kind is FaultKind.ABORT_TIMEOUT


@pytest.mark.parametrize(("rank", "blamed"), [(0, (0,)), (PARKED_RANK, ())], ids=["rank 0", "in a rehearsal"])
def test_a_killed_worker_that_does_not_go_makes_its_host_bad(
    host: Host, rank: int, blamed: tuple[int, ...]
) -> None:
    """One that rehearses has no rank yet, and the leader knows nobody of the rank that stands for this."""
    worker = host.lost_worker(rank)
    host.faults.unreaped(worker)
    fault = host.reported()
    assert fault is not None
    assert (fault.kind, fault.ranks) == (FaultKind.DEVICE, blamed)
    assert str(worker.handle.pid) in fault.detail
