"""Runs jobs in subprocesses, standalone or host by host, and reads what they left. For tests, ours and yours.

Waits are for named events with a deadline; nothing here sleeps to let something happen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from deadpool.liveness.stat import parent_of

Event = dict[str, Any]
Found = TypeVar("Found")
POLL_S = 0.02
KILL_GRACE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A standalone job to run.

    Attributes:
        script: training script.
        args: its arguments.
        options: options of `deadpool run`, injections included.
        run_dir: folder of the run; made by the job.
        limit_s: the job is killed after this.
    """

    script: Path
    run_dir: Path
    args: Sequence[str] = ()
    options: Sequence[str] = ()
    limit_s: float = 120.0


class RunFolder(ABC):
    """What a job has left in its run folder so far.

    Args:
        run_dir: folder of the run; made if it does not exist.
        limit_s: waits end this long after now.
    """

    def __init__(self, run_dir: Path, limit_s: float) -> None:
        self.run_dir = run_dir
        self.limit_s = limit_s
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._deadline_s = time.monotonic() + limit_s

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.run_dir.glob("output*.txt")))

    @abstractmethod
    def has_ended(self) -> bool:
        """No process of the job can add anything any more."""

    def wait_for(self, matches: Callable[[Event], bool], what: str) -> Event:
        """Wait until an event matches; returns the first that does.

        Raises:
            TimeoutError: not within the job's limit, or the job has ended without it.
        """
        return self.wait_until(lambda: next(filter(matches, self.events()), None), what)

    def wait_until(self, find: Callable[[], Found | None], what: str) -> Found:
        """Wait until `find` finds something; returns it. Raises as `wait_for`."""
        while True:
            has_ended = self.has_ended()
            found = find()
            if found:
                return found
            if has_ended or time.monotonic() > self._deadline_s:
                raise TimeoutError(f"no {what}; the job's output ends:\n{self.output[-4000:]}")
            time.sleep(POLL_S)

    def events(self) -> list[Event]:
        """Events of all hosts so far, by time."""
        found = [line for path in self.run_dir.glob("events-*.jsonl") for line in _json_lines(path)]
        return sorted(found, key=lambda event: float(event["monotonic_s"]))

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events() if event["event"] == name]

    def workers(self) -> list[Event]:
        """Worker processes; of one rank in the order in which they took it."""
        found = [line for path in self.run_dir.glob("workers-*.jsonl") for line in _json_lines(path)]
        return sorted(found, key=lambda line: (int(line["generation"]), float(line["monotonic_s"])))

    def injections(self) -> list[Event]:
        """Injections that fired, by time."""
        found = [line for path in (self.run_dir / "injections").glob("*.json") for line in _json_lines(path)]
        return sorted(found, key=lambda event: float(event["monotonic_s"]))

    def records(self, rank: int) -> list[Event]:
        """Everything that was recorded under a rank, in the order of writing."""
        return list(_json_lines(self.run_dir / "records" / f"rank-{rank}.jsonl"))

    def digests(self, rank: int) -> Event:
        """State of a rank at its start and end."""
        return dict(json.loads((self.run_dir / "digests" / f"rank-{rank}.json").read_text()))

    def worker_of(self, rank: int) -> int:
        """Process id of the newest worker of a rank."""
        return int([line["pid"] for line in self.workers() if line["rank"] == rank][-1])

    def agent_of(self, rank: int) -> int:
        """Process id of the agent of the newest worker of a rank.

        Raises:
            ProcessLookupError: that worker is gone.
        """
        worker = self.worker_of(rank)
        agent = parent_of(worker)
        if agent is None:
            raise ProcessLookupError(f"worker {worker} of rank {rank} is gone")
        return agent


class Job(RunFolder):
    """A running standalone job, and afterwards what it left.

    Args:
        spec: what to run.
    """

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec.run_dir, spec.limit_s)
        self.spec = spec
        command = [
            *(sys.executable, "-m", "deadpool", "run", "--standalone", "--run-dir", str(spec.run_dir)),
            *("--record-dir", str(spec.run_dir / "records"), *spec.options, str(spec.script), *spec.args),
        ]
        self.process = _start(command, spec.run_dir / "output.txt")

    def wait(self) -> int:
        """Wait for the end; returns the exit code.

        Raises:
            TimeoutError: the job ran longer than its limit; its output is in the message.
        """
        try:
            return self.process.wait(max(0.1, self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(
                f"the job ran longer than {self.spec.limit_s:g} s; its output ends:\n{self.output[-4000:]}"
            ) from error

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        """End the job, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(KILL_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class HostsJob(RunFolder):
    """One `deadpool run --etcd` per host, started one by one against an etcd of one's own.

    All share a run folder, so that `RunFolder` sees the whole job. Use as a context manager.

    Args:
        spec: what to run; `options` without those that name etcd, job id and run folder.
        etcd: endpoints.
        job_id: equal for all hosts of a job.
    """

    def __init__(self, spec: JobSpec, etcd: Sequence[str], job_id: str) -> None:
        super().__init__(spec.run_dir, spec.limit_s)
        self.spec = spec
        self._etcd = ",".join(etcd)
        self._job_id = job_id
        self.hosts: list[subprocess.Popen[bytes]] = []

    def start_host(
        self, *options: str, environment: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start one more host, its agent being the process that is returned.

        Args:
            options: options of this host alone.
            environment: variables of this host alone.
            wrapper: a command that becomes the command given after it, as `env` does.
        """
        command = [
            *wrapper,
            *(sys.executable, "-m", "deadpool", "run", "--etcd", self._etcd),
            *("--job-id", self._job_id, "--run-dir", str(self.run_dir)),
            *("--record-dir", str(self.run_dir / "records"), *self.spec.options, *options),
            *(str(self.spec.script), *self.spec.args),
        ]
        host = _start(command, self._output_path(len(self.hosts)), environment)
        self.hosts.append(host)
        return host

    def output_of(self, host: subprocess.Popen[bytes]) -> str:
        """What one host has printed so far."""
        return self._output_path(self.hosts.index(host)).read_text(errors="replace")

    def has_ended(self) -> bool:
        return all(host.poll() is not None for host in self.hosts)

    def wait(self) -> dict[int, int]:
        """Wait for the end of all hosts; returns exit codes by process id.

        Raises:
            TimeoutError: the job ran longer than its limit; its output is in the message.
        """
        self.wait_until(self.has_ended, "end of all hosts")
        return {host.pid: host.returncode for host in self.hosts}

    def close(self) -> None:
        """Kill what is left; workers die with their agents."""
        for host in self.hosts:
            host.kill()
            host.wait()

    def _output_path(self, number: int) -> Path:
        return self.run_dir / f"output-{number}.txt"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def running(spec: JobSpec) -> Iterator[Job]:
    """Run a job for the length of a block."""
    job = Job(spec)
    try:
        yield job
    finally:
        job.close()


def run_to_end(spec: JobSpec) -> tuple[Job, int]:
    """Run a job to its end; returns it with its exit code."""
    with running(spec) as job:
        return job, job.wait()


def _start(
    command: Sequence[str], output_path: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process as the leader of its session, to be ended with all that it started."""
    with open(output_path, "wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
        )


def _json_lines(path: Path) -> Iterator[Event]:
    """Lines that are whole; the last one of a killed writer may not be."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        if line:
            try:
                yield json.loads(line)
            except ValueError:
                continue
