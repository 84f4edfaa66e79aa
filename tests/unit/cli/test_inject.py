"""`deadpool inject`: strikes the worker that runs as a rank on this machine, and nobody else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deadpool.cli.inject import inject_running_job
from deadpool.cli.jobs import JobFile, write_job_file
from deadpool.cli.slurm.job import write_job
from deadpool.config import Config
from deadpool.errors import ConfigError
from deadpool.events import boottime_s
from deadpool.liveness.stat import started_s, state_of
from deadpool.runtime.processes import WorkerHandle
from tests.unit.cli.slurm_jobs import make_job

RANK = 1
WAIT_S = 10.0

# Lines are written with one call each: processes share the pipe.
_AGENT = """
import json, os, subprocess, sys
handover = json.dumps({"parent": os.getpid(), "run_dir": sys.argv[1]})
environment = {**os.environ, "DEADPOOL_WORKER": handover}
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=environment)
os.write(1, f"{worker.pid}\\n".encode())
worker.wait()
os.write(1, b"the agent saw its worker end\\n")
sys.stdin.read()
"""
_WORKER = """
import os, time
if os.fork() == 0:
    os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(1000)
"""


class Host:
    """An agent, its worker and a process that the worker has forked, as far as `inject` looks at them."""

    def __init__(self, label: str, run_dir: Path) -> None:
        self.agent = subprocess.Popen(
            [sys.executable, "-c", _AGENT, str(run_dir), _WORKER],
            env={**os.environ, "DEADPOOL_AGENT": json.dumps({"host": label})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.agent.stdin is not None and self.agent.stdout is not None
        self._stdin, self.stdout = self.agent.stdin, self.agent.stdout
        self.worker, self.forked = (int(self.stdout.readline()) for _ in range(2))

    @property
    def states(self) -> list[str]:
        return [state_of(pid) for pid in (self.agent.pid, self.worker, self.forked)]

    @property
    def is_untouched(self) -> bool:
        return set(self.states) <= set("SRD")

    def close(self) -> None:
        for pid in (self.forked, self.worker, self.agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stdin.close()
        self.agent.wait(WAIT_S)
        self.stdout.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of job `j`, whose file is in the folder `jobs` next to it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_job_file(JobFile(job_id="j", token="t", run_dir=str(run_dir), pid=os.getpid()), tmp_path / "jobs")
    return run_dir


@pytest.fixture
def start_host() -> Iterator[Callable[[str, Path], Host]]:
    hosts: list[Host] = []

    def start(label: str, run_dir: Path) -> Host:
        hosts.append(Host(label, run_dir))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


def note(run_dir: Path, member: str, pid: int, monotonic_s: float | None = None) -> None:
    """This process runs as RANK from now on."""
    moment_s = boottime_s() if monotonic_s is None else monotonic_s
    line = {"member": member, "rank": RANK, "pid": pid, "generation": 1, "monotonic_s": moment_s}
    with open(run_dir / f"workers-{member}.jsonl", "a") as file:
        file.write(json.dumps({**line, "role": "active"}) + "\n")


def inject(run_dir: Path, kind: str, job: str | None = "j") -> str:
    return inject_running_job(job, f"{kind}:rank={RANK}", run_dir.parent / "jobs")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not happen within {WAIT_S:g} s"
        threading.Event().wait(0.01)


def test_a_worker_as_agents_start_them_is_struck(run_dir: Path) -> None:
    handle = WorkerHandle(0, Config(), run_dir, lambda *_: None, lambda *_: None)
    try:
        note(run_dir, f"{socket.gethostname().split('.')[0]}-aa", handle.pid)
        assert inject(run_dir, "sigkill") == f"sigkill sent to rank {RANK} (worker pid {handle.pid})"
        assert handle.process.wait(WAIT_S) == -signal.SIGKILL
    finally:
        handle.kill()
        assert handle.reap(WAIT_S)
    record = json.loads((run_dir / "injections/manual-0.json").read_text())
    assert (record["kind"], record["rank"], record["pid"]) == ("sigkill", RANK, handle.pid)
    with pytest.raises(ConfigError, match="no live worker of rank 1"):
        inject(run_dir, "sigkill")


def test_a_host_is_struck_with_all_its_processes(
    run_dir: Path, start_host: Callable[[str, Path], Host]
) -> None:
    host = start_host("h0", run_dir)
    note(run_dir, "h0-aa", host.worker)
    assert inject(run_dir, "host-loss", None).startswith("host-loss sent to the host of rank 1")
    assert host.agent.wait(WAIT_S) == -signal.SIGKILL
    wait_until(lambda: all(state in "ZX" for state in host.states))
    assert host.stdout.read() == ""  # the agent saw nothing


def test_a_job_under_slurm_is_named_by_its_run_folder(
    run_dir: Path, start_host: Callable[[str, Path], Host]
) -> None:
    host = start_host("n1", run_dir)
    note(run_dir, "n1-aa", host.worker)
    with pytest.raises(ConfigError, match="under Slurm, give the run folder"):
        inject(run_dir, "sigkill", "slurm-7")
    write_job(run_dir, make_job(Config()))
    assert "sigkill sent" in inject(run_dir, "sigkill", str(run_dir))
    assert host.stdout.readline() == "the agent saw its worker end\n"


def test_a_torn_line_is_skipped(run_dir: Path, start_host: Callable[[str, Path], Host]) -> None:
    host = start_host("h0", run_dir)
    note(run_dir, "h0-aa", host.worker)
    with open(run_dir / "workers-h0-aa.jsonl", "a") as file:
        file.write('{"member": "h0-a')
    assert "sigkill sent" in inject(run_dir, "sigkill")


def test_of_a_rank_of_another_machine_the_host_is_named_and_nobody_is_struck(
    run_dir: Path, start_host: Callable[[str, Path], Host]
) -> None:
    host = start_host("n1", run_dir)
    note(run_dir, "n1-aa", host.worker)
    note(run_dir, "n3-cc", host.worker)  # as in containers, where the numbers are the same on every machine
    with pytest.raises(ConfigError, match=r"it last ran on host n3, .* run this there"):
        inject(run_dir, "host-loss")
    assert host.is_untouched


def test_a_process_that_is_no_worker_of_this_run_is_not_struck(
    run_dir: Path, tmp_path: Path, start_host: Callable[[str, Path], Host]
) -> None:
    of_another_run, own = start_host("h0", tmp_path / "other"), start_host("h0", run_dir)
    for pid in (of_another_run.worker, own.forked, own.agent.pid):
        note(run_dir, "h0-aa", pid)
        with pytest.raises(ConfigError, match="no live worker of rank 1"):
            inject(run_dir, "host-stop")
    assert of_another_run.is_untouched
    assert own.is_untouched


def test_a_pid_that_was_given_to_another_worker_is_not_struck(
    run_dir: Path, start_host: Callable[[str, Path], Host]
) -> None:
    host = start_host("h0", run_dir)
    began_s = started_s(host.worker)
    assert began_s is not None
    note(run_dir, "h0-aa", host.worker, began_s - 10)
    with pytest.raises(ConfigError, match="no live worker"):
        inject(run_dir, "sigstop")
    assert host.is_untouched


def test_a_rank_that_nobody_has_taken_is_said_so(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no process has run as rank 1 yet"):
        inject(run_dir, "sigkill")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("exit:rank=1", "kinds from outside"),
        ("bitflip:rank=1", "kinds from outside"),
        ("sigkill:rank=1@step=3", "it has no step"),
        ("sigkill", "it has no step"),
    ],
)
def test_what_cannot_be_done_from_outside_is_refused(tmp_path: Path, spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        inject_running_job("j", spec, tmp_path)
