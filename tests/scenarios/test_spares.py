"""Spares that are broken (A13), and none left (A09)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool.liveness.stat import parent_of
from deadpool.testing.cluster import Job
from tests.scenarios.conftest import RECOVER_S

Launch = Callable[..., Job]

ARGS = ("--steps", "40")


def left_behind(job: Job) -> list[int]:
    """Worker processes of the job that still exist."""
    return [worker["pid"] for worker in job.workers() if Path(f"/proc/{worker['pid']}").exists()]


def check_next_spare_was_used(rig: Any, job: Job, args: tuple[str, ...]) -> None:
    """A13: one spare was turned away for good and with its reason; another one has the slot."""
    assert job.wait() == 0, job.output[-4000:]
    (quarantined,) = job.named("member.quarantined")
    assert "the mount that only this host lacks" in quarantined["reason"]
    host = quarantined["subject"].partition("-")[0]
    assert f"deadpool: this job quarantined host {host}" in job.output  # its last line, before code 73
    used = job.named("view.published")[-1]["slots"][1]
    assert not used.startswith(f"{host}-")
    rig.check_trace(job, args, world_size=2)
    rig.check_survivors(job, replaced={1}, world_size=2)


@pytest.mark.full
def test_a_spare_whose_rehearsal_fails_is_quarantined_before_anybody_needs_it(
    rig: Any, launch: Launch, tmp_path: Path
) -> None:
    args = (*ARGS, "--fail-first-rehearsal", str(tmp_path / "failed"))
    job = launch(args, nnodes=2, spares=2)
    job.wait_for(lambda event: event["event"] == "member.quarantined", "the quarantine")
    agent = parent_of(next(worker["pid"] for worker in job.workers() if worker["rank"] == 1))
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    check_next_spare_was_used(rig, job, args)


@pytest.mark.full
def test_a_spare_that_fails_when_it_is_promoted_is_quarantined_and_the_next_one_used(
    rig: Any, launch: Launch, tmp_path: Path
) -> None:
    args = (*ARGS, "--fail-first-promotion", str(tmp_path / "failed"))
    job = launch(args, nnodes=2, spares=2, options=("--inject", "host-loss:rank=1@step=15"))
    check_next_spare_was_used(rig, job, args)
    generations = [event["generation"] for event in job.named("recovery.begin")]
    assert generations == [2, 3]
    rig.check_recovery(job, job.injections()[0]["monotonic_s"], within_s=2 * RECOVER_S)


@pytest.mark.full
def test_without_a_spare_left_the_job_writes_its_last_common_step_and_ends_with_code_3(
    rig: Any, launch: Launch, tmp_path: Path
) -> None:
    wait_s = 4.0
    folder = tmp_path / "checkpoints"
    job = launch(
        ("--steps", "60"),
        options=(
            *("--spare-wait-s", f"{wait_s:g}", "--checkpoint-dir", str(folder)),
            *("--inject", "host-loss:rank=1@step=8", "--inject", "host-loss:rank=3@step=25"),
        ),
    )
    stalled = job.wait_for(
        lambda event: event["event"] == "view.published" and event["phase"] == "stalled", "STALLED"
    )
    began_s = time.monotonic()
    assert job.wait() == 3, job.output[-4000:]
    assert time.monotonic() - began_s <= wait_s + 10.0
    assert f"No spare came within {wait_s:g} s (spare_wait_s) for rank 3." in job.output
    assert stalled["slots"].count("") == 1
    assert not left_behind(job)
    finished = [max(int(r["s"]) for r in job.records(rank)) for rank in range(4)]
    manifests = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
    saved = [int(name.removeprefix("step-").split(".")[0]) for name in manifests]
    assert saved, "no checkpoint is complete"
    # The newest step of which every rank has a live copy: at most what the slowest finished, and as a step
    # takes longer than its copy, not more than one before it.
    assert min(finished) - 1 <= max(saved) <= min(finished)
    assert len(job.named("recovery.done")) == 1
