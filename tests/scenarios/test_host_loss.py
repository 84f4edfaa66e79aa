"""Scenarios A01, A02, A03 and A22 of the catalogue: hosts and workers that die or fall silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]


def test_a_lost_host_is_replaced_and_nothing_else_changes(rig: Any, launch: Launch) -> None:
    job = launch(options=("--inject", "host-loss:rank=2@step=9"))
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job)
    rig.check_one_owner(job)
    rig.check_survivors(job, replaced={2})
    struck_s = job.injections()[0]["monotonic_s"]
    done = rig.check_recovery(job, struck_s)
    assert done["source"] == "replicated"
    rig.check_nothing_safe_lost(job, done, struck_s)


@pytest.mark.full
def test_the_host_of_rank_0_is_replaced_twice_like_any_other(rig: Any, launch: Launch) -> None:
    job = launch(
        spares=2,
        options=("--inject", "host-loss:rank=0@step=6", "--inject", "host-loss:rank=0@step=13"),
    )
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job)
    rig.check_one_owner(job)
    rig.check_survivors(job, replaced={0})
    lost = [worker["member"] for worker in job.workers() if worker["rank"] == 0][:-1]
    last_view = job.named("view.published")[-1]
    assert not set(lost) & set(last_view["slots"])
    for injection in job.injections():
        rig.check_recovery(job, injection["monotonic_s"])


@pytest.mark.parametrize("kind", ["host-stop", pytest.param("sigstop", marks=pytest.mark.full)])
def test_silence_inside_a_collective_is_found_by_membership(rig: Any, launch: Launch, kind: str) -> None:
    job = launch(options=("--inject", f"{kind}:rank=1@step=9"))
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job)
    rig.check_one_owner(job)
    rig.check_survivors(job, replaced={1})
    rig.check_recovery(job, job.injections()[0]["monotonic_s"])
    struck = next(worker["member"] for worker in job.workers() if worker["rank"] == 1)
    assert struck not in job.named("view.published")[-1]["slots"]


def test_two_recoveries_with_accumulation_and_dropout_continue_exactly(rig: Any, launch: Launch) -> None:
    args = ("--accumulate", "2", "--steps", "16")
    job = launch(
        args,
        spares=2,
        options=("--inject", "host-loss:rank=3@step=5", "--inject", "sigkill:rank=1@step=11"),
    )
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args)
    rig.check_survivors(job, replaced={1, 3})
    assert len(job.named("recovery.done")) == 2
