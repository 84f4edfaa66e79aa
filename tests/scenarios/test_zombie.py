"""A04: a host that was stopped, and replaced, goes on: it ends its workers and disturbs nobody."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from deadpool.cli.jobs import find_job
from deadpool.liveness.stat import parent_of
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.testing.cluster import Job
from tests.scenarios.conftest import wait_until_gone

Launch = Callable[..., Job]

ARGS = ("--steps", "100")  # as in test_status: one undisturbed run serves both
AWAKE_LIMIT_S = 5.0


def revisions(job_id: str, member: str) -> dict[str, int]:
    """Keys that name a member, with the revision of their last change."""
    with EtcdStore(EtcdConfig(endpoints=find_job(job_id).etcd)) as store:
        pairs, _ = store.get_prefix(f"/deadpool/{job_id}/")
    return {pair.key: pair.mod_revision for pair in pairs if member in pair.key}


@pytest.mark.full
def test_a_stopped_host_that_wakes_after_its_replacement_ends_its_worker_and_writes_nothing(
    rig: Any, launch: Launch
) -> None:
    job_id = f"zombie-{os.getpid()}"
    job = launch(ARGS, nnodes=2, options=("--job-id", job_id, "--inject", "host-stop:rank=1@step=9"))
    job.wait_for(lambda e: e["event"] == "snapshot.committed" and e["generation"] == 2, "a new commit")
    zombie = next(worker for worker in job.workers() if worker["rank"] == 1)
    agent = parent_of(zombie["pid"])
    assert agent is not None
    before = revisions(job_id, zombie["member"])
    for pid in (agent, zombie["pid"]):
        os.kill(pid, signal.SIGCONT)
    wait_until_gone(zombie["pid"], AWAKE_LIMIT_S)
    job.wait_for(lambda e: e["event"] == "member.fenced" and e["member"] == zombie["member"], "the fencing")
    after = revisions(job_id, zombie["member"])
    assert after.items() <= before.items()  # nothing new, nothing changed; clean-up may delete
    assert job.wait() == 0, job.output[-4000:]
    assert re.search(r"worker ends with code 73: its host was replaced", job.output)
    assert job.named("view.published")[-1]["generation"] == 2
    rig.check_trace(job, ARGS, world_size=2)
    rig.check_one_owner(job, world_size=2)
    rig.check_survivors(job, replaced={1}, world_size=2)
