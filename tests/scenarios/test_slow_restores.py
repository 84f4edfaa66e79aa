"""Restores that take long: their limits grow with what a host needs to start the script."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool.liveness.stat import parent_of

Launch = Callable[..., Any]

FIRST_START_S = 15.0
LONG_S = 47.0
"""The limits that do not grow: 30 s to rebuild and 15 s to ack."""


def is_restoring(event: dict[str, Any]) -> bool:
    return bool(event["event"] == "view.published" and event["phase"] == "restoring")


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_restore_may_take_longer_than_the_fixed_limits(rig: Any, launch: Launch, tmp_path: Path) -> None:
    """The script took 15 s at its first start, so a spare is given 30 s more for its own."""
    args = ("--steps", "20", "--holds", str(tmp_path))
    hold = tmp_path / "rank-1"
    hold.touch()
    job = launch(
        args,
        nnodes=2,
        options=("--no-rehearse", "--inject", "host-loss:rank=1@step=8"),
        limit_s=200.0,
    )
    job.wait_for(lambda event: event["event"] == "worker.assigned" and event["rank"] == 1, "first start")
    time.sleep(FIRST_START_S)
    hold.unlink()
    job.wait_for(lambda event: event["event"] == "snapshot.committed", "commit")
    hold.touch()
    job.wait_for(is_restoring, "restore")
    time.sleep(LONG_S)
    hold.unlink()
    assert job.wait() == 0, job.output[-4000:]
    (done,) = job.named("recovery.done")
    assert done["generation"] == 2, "the spare was given up"
    assert done["seconds"] > LONG_S
    rig.check_trace(job, args, world_size=2)
    rig.check_survivors(job, replaced={1}, world_size=2)


@pytest.mark.full
def test_a_leader_elected_during_a_restore_brings_it_to_its_end(
    rig: Any, launch: Launch, tmp_path: Path
) -> None:
    """The leader is lost while a spare builds. Its host may have a slot, which is then filled as well."""
    args = ("--steps", "20", "--holds", str(tmp_path))
    job = launch(args, nnodes=4, spares=2, options=("--no-rehearse",))
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 3, "commit")
    leader = job.named("leader.elected")[-1]["member"]
    led = {worker["rank"] for worker in job.workers() if worker["member"] == leader}
    victim = (min(led) + 2) % 4 if led else 3  # neither holds copies of the other
    (tmp_path / f"rank-{victim}").touch()
    os.kill(job.agent_of(victim), signal.SIGKILL)
    restoring = job.wait_for(is_restoring, "restore")
    os.kill(agent_of_member(job, leader), signal.SIGKILL)
    elected = job.wait_for(
        lambda event: event["event"] == "leader.elected" and event["member"] != leader, "new leader"
    )
    (tmp_path / f"rank-{victim}").unlink()
    assert job.wait() == 0, job.output[-4000:]
    done = job.named("recovery.done")[-1]
    assert restoring["member"] == leader
    assert done["member"] == elected["member"]
    rig.check_trace(job, args, world_size=4)
    rig.check_one_owner(job, world_size=4)
    rig.check_survivors(job, replaced={victim} | led, world_size=4)


def agent_of_member(job: Any, member: str) -> int:
    ready = next(event for event in job.named("worker.ready") if event["member"] == member)
    agent = parent_of(int(ready["pid"]))
    assert agent is not None
    return agent
