"""A state that can no longer be captured: the job trains on, and says that it is protected no further."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deadpool.testing.cluster import Job

Launch = Callable[..., Job]

GROW_STEP = 8
HOLD_STEP = 30  # so that the job is not over before its status was asked for


def test_a_buffer_that_grows_is_told_at_once_and_once_with_rank_step_and_remedy(
    launch: Launch, tmp_path: Path
) -> None:
    job_id = f"unprotected-{os.getpid()}"
    hold = tmp_path / f"step-{HOLD_STEP}"
    hold.touch()
    job = launch(
        ("--steps", str(HOLD_STEP + 2), "--grow-at", str(GROW_STEP), "--holds", str(tmp_path)),
        nnodes=2,
        spares=0,
        options=("--job-id", job_id),
    )
    told = job.wait_for(lambda event: event["event"] == "snapshot.degraded", "word of it")
    job.wait_for(
        lambda event: event["event"] == "snapshot.refused" and event["step"] > told["step"], "more refusals"
    )
    status = subprocess.run(
        [sys.executable, "-m", "deadpool", "status", job_id, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert status.returncode == 0, status.stderr
    said = json.loads(status.stdout)
    hold.unlink()
    assert job.wait() == 0, job.output[-4000:]

    protected = max(event["step"] for event in job.named("snapshot.committed"))
    assert protected < GROW_STEP <= told["step"]
    assert told["reason"].startswith(
        f"no step after {protected} is protected: rank 1 cannot be captured since step {told['step']}: "
    )
    assert "seen.buffer is now float32[8], it was float32[4]. Change tensors in place" in told["reason"]
    assert said["degraded"] == [told["reason"]]
    assert said["protected"]["step"] == protected
    assert job.output.count("degraded: ") == 1
    assert f"degraded: {told['reason']}\n" in job.output
