"""Several recoveries in one run, and the second API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deadpool.runtime.agent_process import REJOIN_DELAY_S

Launch = Callable[..., Any]


def test_three_recoveries_in_a_row_change_no_bit(rig: Any, launch: Launch) -> None:
    """With --respawn each lost host comes back as a spare, so one spare is enough."""
    args = ("--steps", "60")
    job = launch(
        args,
        nnodes=3,
        options=(
            "--respawn",
            "--inject",
            "host-loss:rank=1@step=6",
            "--inject",
            "sigkill:rank=2@step=25",
            "--inject",
            "host-loss:rank=0@step=45",
        ),
    )
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args, world_size=3)
    rig.check_one_owner(job, world_size=3)
    assert len(job.named("recovery.done")) == 3


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_loop_of_single_steps_is_protected_like_train(rig: Any, launch: Launch, parallel: str) -> None:
    args = ("--api", "wrap_step", "--parallel", parallel, "--steps", "14")
    job = launch(args, nnodes=3, options=("--inject", "host-loss:rank=1@step=7"))
    assert job.wait() == 0, job.output[-4000:]
    undisturbed = rig.undisturbed(args, 3)
    for rank in range(3):
        assert job.digests(rank)["final"] == undisturbed.digests(rank)["final"]
        assert job.digests(rank)["blob"] == undisturbed.digests(rank)["blob"]
    rig.check_survivors(job, replaced={1}, world_size=3)


def test_the_same_error_of_the_user_twice_ends_the_job_with_its_traceback(launch: Launch) -> None:
    """A23: no endless loop, and the spares are there for hosts that fail."""
    job = launch(("--raise-at", "6"), nnodes=2, spares=2)
    assert job.wait() == 1, job.output[-4000:]
    assert "ValueError: a bug of the user at step 6" in job.output
    assert "[rank 1]" in job.output
    assert len(job.named("recovery.done")) == 1
    assert len({tuple(event["slots"]) for event in job.named("view.published")}) == 1  # no spare was burned


@pytest.mark.full
def test_the_host_of_a_killed_worker_comes_back_when_the_first_steps_are_done(launch: Launch) -> None:
    job = launch(("--steps", "1000"), nnodes=2, spares=1, options=("--inject", "sigkill:rank=1@step=6"))
    fenced = job.wait_for(lambda event: event["event"] == "member.fenced", "fenced host")
    host = fenced["member"].split("-")[0]

    def is_back(event: dict[str, Any]) -> bool:
        is_other = event["member"] != fenced["member"] and event["member"].startswith(f"{host}-")
        return bool(is_other and event["event"] == "worker.ready")

    ready = job.wait_for(is_back, f"new member of {host}")
    started_s = ready["monotonic_s"] - ready["seconds"]
    assert started_s >= fenced["monotonic_s"] + REJOIN_DELAY_S
    job.wait_for(lambda event: event["event"] == "recovery.phase" and event["phase"] == "first_step", "step")
