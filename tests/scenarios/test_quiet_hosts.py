"""Scenario A05 of the catalogue: a host that is healthy and says nothing for a while keeps its slot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

Launch = Callable[..., Any]

TTL = ("--lease-ttl-s", "5")
PAUSE_S = 1.0
LONGER_THAN_TTL_S = 8.0


def states(job_id: str) -> dict[str, str]:
    """What `deadpool status` says of each host."""
    done = subprocess.run(
        [sys.executable, "-m", "deadpool", "status", job_id, "--json"],
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
    )
    return {host["host"]: host["state"] for host in json.loads(done.stdout)["hosts"]}


def check_nobody_was_replaced(rig: Any, job: Any, args: tuple[str, ...]) -> None:
    assert job.wait() == 0, job.output[-4000:]
    assert not job.named("recovery.begin")
    assert {record["g"] for record in job.records(0)} == {1}
    rig.check_trace(job, args, world_size=3)
    rig.check_survivors(job, replaced=set(), world_size=3)


@pytest.mark.full
def test_a_host_that_is_stopped_for_a_second_keeps_its_slot(rig: Any, launch: Launch) -> None:
    args = ("--steps", "60")
    job = launch(args, nnodes=3, options=TTL)
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    host = [job.agent_of(1), job.worker_of(1)]
    for pid in host:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for pid in host:
        os.kill(pid, signal.SIGCONT)
    check_nobody_was_replaced(rig, job, args)


@pytest.mark.full
def test_a_host_that_holds_the_gil_in_a_quiet_section_keeps_its_slot(rig: Any, launch: Launch) -> None:
    """15 s in native code that lets no other thread of the worker run, three times the TTL."""
    args = ("--hold-gil-at", "9")
    job = launch(args, nnodes=3, options=(*TTL, "--job-id", "holds-gil"))
    job.wait_until(lambda: any(record["s"] == 8 for record in job.records(1)), "step 8")
    time.sleep(LONGER_THAN_TTL_S)
    assert max(record["s"] for record in job.records(1)) == 8, "the GIL was not held"
    assert sorted(states("holds-gil").values()) == ["active", "active", "active", "spare"]
    check_nobody_was_replaced(rig, job, args)


@pytest.mark.full
def test_a_host_that_collects_garbage_for_three_seconds_keeps_its_slot(rig: Any, launch: Launch) -> None:
    args = ("--collect-at", "9")
    job = launch(args, nnodes=3, options=TTL)
    check_nobody_was_replaced(rig, job, args)
    times = [float(record["t"]) for record in job.records(1) if record["n"] == "lr"]
    assert max(later - earlier for earlier, later in pairwise(times)) > 3.0
