"""A25: what `deadpool status` says of a job that recovers, and of one without its control plane."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.jobs import find_job
from deadpool.cli.status import gather_status
from deadpool.liveness.stat import parent_of
from deadpool.report import JobStatus
from deadpool.testing.cluster import Job
from tests.scenarios.conftest import DETECT_S, wait_until_gone

Launch = Callable[..., Job]

BEFORE, STRUCK, AFTER = 10, 20, 60  # it waits before the first and the last until its status was asked for
ANSWER_S = 3.0
END_S = 10.0
START_S = (
    3.0  # of Python and the command, on a loaded machine; tests/unit/cli holds status to ANSWER_S itself
)
LINES_PER_RECOVERY = 30  # on stderr, of all hosts together


def ask(job_id: str) -> tuple[JobStatus, str]:
    """What status says, without waiting for long."""
    began_s = time.monotonic()
    answer = gather_status(find_job(job_id))
    assert time.monotonic() - began_s <= ANSWER_S + START_S
    return answer


def states(status: JobStatus) -> dict[str, str]:
    return {host.member: host.state for host in status.hosts}


def etcd_of(job: Job) -> int:
    """Pid of the embedded etcd: a child of the launcher."""
    for task in Path(f"/proc/{job.process.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if "etcd" in Path(f"/proc/{pid}/comm").read_text():
                    return int(pid)
    raise AssertionError("the launcher has no etcd")


def processes_of(job: Job) -> set[int]:
    """Agents, workers and etcd, while the job runs."""
    workers = {worker["pid"] for worker in job.workers()} | {e["pid"] for e in job.named("worker.ready")}
    agents = {parent for pid in workers if (parent := parent_of(pid)) is not None}
    return workers | agents | {etcd_of(job)}


def shared_files(processes: set[int]) -> set[str]:
    """Names in /dev/shm that those of these processes that live have mapped now."""
    names: set[str] = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            names.update(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return names


def is_named_after(name: str, processes: set[int]) -> bool:
    """Whether the first number in a name is the id of one of the processes, as in torch_PID_7."""
    number = re.search(r"\d+", name)
    return number is not None and int(number[0]) in processes


def test_status_tells_the_truth_before_during_and_after_a_recovery_and_without_etcd(
    rig: Any, launch: Launch, tmp_path: Path
) -> None:
    job_id = f"status-{os.getpid()}"
    args = ("--steps", str(AFTER + 20), "--holds", str(tmp_path))
    for step in (BEFORE, AFTER):
        (tmp_path / f"step-{step}").touch()
    strike = f"host-stop:rank=1@step={STRUCK}"
    job = launch(args, nnodes=2, options=("--job-id", job_id, "--inject", strike))
    job.wait_until(lambda: len(job.named("member.registered")) == 3, "third host")
    job.wait_for(lambda e: e["event"] == "snapshot.committed" and e["step"] > 2, "a commit")
    before, problem = ask(job_id)
    assert (problem, before.phase, before.generation) == ("", "running", 1)
    assert sorted(states(before).values()) == ["active", "active", "spare"]
    assert before.protected is not None
    (victim,) = (rank.member for rank in before.ranks if rank.rank == 1)

    (tmp_path / f"step-{BEFORE}").unlink()
    struck_s = job.wait_until(job.injections, "a strike")[0]["monotonic_s"]
    phases = set()
    while not job.named("recovery.done"):
        asked_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        during, problem = ask(job_id)
        assert problem == ""
        phases.add(during.phase)
        assert victim in states(during), during
        if asked_s > struck_s + DETECT_S:
            assert states(during)[victim] != "active"
    assert phases <= {"running", "aborting", "restoring"}

    after, problem = ask(job_id)
    while not after.recoveries:  # the leader's summary follows within moments
        assert job.process.poll() is None
        assert victim in states(after), after
        after, problem = ask(job_id)
    assert (problem, after.generation) == ("", 2)
    assert states(after).get(victim) == "dead", (states(after), after.recoveries)
    assert sorted(states(after).values()) == ["active", "active", "dead"]
    (recovery,) = after.recoveries
    assert recovery["replaced"] == [victim]

    processes = processes_of(job)
    shared = shared_files(processes)
    etcd = etcd_of(job)
    os.kill(etcd, signal.SIGSTOP)
    try:
        without, problem = ask(job_id)
        asked_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "deadpool", "status", job_id, "--json"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        answered_s = time.monotonic()
    finally:
        os.kill(etcd, signal.SIGCONT)
    assert problem
    assert without.control_plane == "unreachable"
    assert [rank.state for rank in without.ranks] == ["running", "running"]
    assert answered_s - asked_s <= ANSWER_S + START_S
    assert done.returncode == 5
    assert "control plane unreachable" in done.stderr
    assert json.loads(done.stdout)["control_plane"] == "unreachable"

    (tmp_path / f"step-{AFTER}").unlink()
    # The end, with the host that was struck still stopped.
    ended_s = job.wait_for(lambda e: e["event"] == "run.finished", "the end")["monotonic_s"]
    assert job.wait() == 0, job.output[-4000:]
    assert time.clock_gettime(time.CLOCK_BOOTTIME) - ended_s <= END_S
    for pid in processes:
        wait_until_gone(pid, END_S)
    left = {name for name in os.listdir("/dev/shm") if name in shared or is_named_after(name, processes)}
    assert not left
    assert job.named("recovery.done")[0]["generation"] == 2
    rig.check_trace(job, args, world_size=2)


@pytest.mark.full
def test_a_recovery_takes_few_lines_and_names_host_and_step(rig: Any, launch: Launch) -> None:
    """All hosts together: what an operator has to read at night."""
    job = launch(options=("--inject", "host-loss:rank=2@step=9"))
    assert job.wait() == 0, job.output[-4000:]
    quiet = rig.undisturbed(()).output.splitlines()
    lines = job.output.splitlines()
    assert len(lines) - len(quiet) <= LINES_PER_RECOVERY, job.output
    assert re.search(r"aborting: Host h\d \(rank 2\) is lost: ", job.output)
    assert any("running, after step" in line for line in lines)
    assert any("recovered in" in line and "back to step" in line for line in lines)
