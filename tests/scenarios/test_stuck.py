"""Workers that live and make no progress: one that spins is replaced, one that is quiet on purpose is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]
PROGRESS_TIMEOUT = ("--progress-timeout-s", "3")


@pytest.mark.full
def test_a_worker_that_spins_is_named_by_what_others_wait_for(rig: Any, launch: Launch) -> None:
    job = launch(("--spin-at", "9"), nnodes=3, options=PROGRESS_TIMEOUT)
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, world_size=3)
    rig.check_one_owner(job, world_size=3)
    rig.check_survivors(job, replaced={1}, world_size=3)
    (culprit,) = job.named("progress.culprit")
    assert culprit["ranks"] == [1]
    (done,) = job.named("recovery.done")
    rig.check_nothing_safe_lost(job, done, culprit["monotonic_s"])


@pytest.mark.full
def test_a_quiet_section_is_no_stall(rig: Any, launch: Launch) -> None:
    job = launch(("--quiet-at", "9"), nnodes=3, options=PROGRESS_TIMEOUT)
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, world_size=3)
    assert not job.named("recovery.done")
    rig.check_survivors(job, replaced=set(), world_size=3)


@pytest.mark.full
def test_a_collective_that_one_rank_calls_alone_is_named_after_seconds(launch: Launch) -> None:
    job = launch(("--lone-call-at", "9"), nnodes=3, options=PROGRESS_TIMEOUT)
    odd = job.wait_for(lambda event: event["event"] == "collective.disagreement", "names of odd callers")
    last_step_s = max(float(record["t"]) for record in job.records(0))
    assert odd["ranks"] == [0, 1, 2]
    assert "rank 1 waits in " in odd["detail"]
    assert odd["monotonic_s"] - last_step_s < 15.0, "the collective timeout is 120 s"
    assert "ranks [0, 1, 2] wait for one another: rank 0 waits in " in job.output
