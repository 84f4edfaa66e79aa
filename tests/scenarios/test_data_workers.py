"""Processes that load data, forked by the trainers: they end with their trainer, and do not multiply."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from deadpool.events import boottime_s
from deadpool.liveness.stat import started_s
from deadpool.testing.faults import descendants

Launch = Callable[..., Any]

LOADERS = 2
GONE_S = 5.0
POLL_S = 0.05


def loaders_of(job: Any, rank: int) -> dict[int, float]:
    """Data-loading processes of a rank, with the moments at which they began."""
    found = {pid: started_s(pid) for pid in descendants(job.worker_of(rank))}
    return {pid: began for pid, began in found.items() if began is not None}


def wait_until_gone(loaders: dict[int, float], struck_s: float) -> None:
    while alive := [pid for pid, began in loaders.items() if started_s(pid) == began]:
        late_s = boottime_s() - struck_s
        assert late_s < GONE_S, f"data workers {alive} outlive their trainer by {late_s:.1f} s"
        time.sleep(POLL_S)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["host-loss", "sigkill"])
def test_data_workers_end_with_their_trainer_and_do_not_multiply(rig: Any, launch: Launch, kind: str) -> None:
    args = ("--num-workers", str(LOADERS), "--steps", "40", "--step-s", "0.2")
    job = launch(
        args,
        nnodes=2,
        spares=2,
        options=("--inject", f"{kind}:rank=1@step=10", "--inject", f"{kind}:rank=1@step=24"),
    )
    job.wait_for(lambda event: event["event"] == "snapshot.committed", "commit")
    for number in (1, 2):
        loaders = job.wait_until(
            lambda: len(found := loaders_of(job, 1)) == LOADERS and found, "data workers of rank 1"
        )
        job.wait_until(lambda n=number: len(job.injections()) == n, f"injection {number}")
        wait_until_gone(loaders, job.injections()[-1]["monotonic_s"])
        done = job.wait_until(
            lambda n=number: len(job.named("recovery.done")) == n and job.named("recovery.done")[-1],
            f"recovery {number}",
        )
        job.wait_for(
            lambda event, g=done["generation"]: (
                event["event"] == "snapshot.committed" and event["generation"] == g
            ),
            "commit after the recovery",
        )
        assert len(loaders_of(job, 0)) == LOADERS
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args, world_size=2)
    rig.check_survivors(job, replaced={1}, world_size=2)
