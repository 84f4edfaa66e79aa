"""Runs a standalone job in a subprocess, and reads what it left. For tests of jobs, ours and yours.

Waits are for named events with a deadline; nothing here sleeps to let something happen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
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


class Job:
    """A running job, and afterwards what it left.

    Args:
        spec: what to run.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.run_dir = spec.run_dir
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        self.output_path = spec.run_dir / "output.txt"
        self._deadline_s = time.monotonic() + spec.limit_s
        with open(self.output_path, "wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "deadpool",
                    "run",
                    "--standalone",
                    "--run-dir",
                    str(spec.run_dir),
                    "--record-dir",
                    str(spec.run_dir / "records"),
                    *spec.options,
                    str(spec.script),
                    *spec.args,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        return self.output_path.read_text(errors="replace")

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

    def wait_for(self, matches: Callable[[Event], bool], what: str) -> Event:
        """Wait until an event matches; returns it.

        Raises:
            TimeoutError: not within the job's limit, or the job has ended without it.
        """
        while True:
            has_ended = self.process.poll() is not None
            for event in self.events():
                if matches(event):
                    return event
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
        """Worker processes in the order in which they took their ranks."""
        return list(_json_lines(self.run_dir / "workers.jsonl"))

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

    def close(self) -> None:
        """End the job, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(KILL_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


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
