"""The victim dies at each point of a step. All ranks agree on the step that counts, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]

STEPS, STRUCK = "18", 9  # the first commit is late by a fixed time, so not in the first steps
POINTS = (
    "before-forward",
    "collective=1",
    "before-optimizer",
    "in-optimizer",
    "after-optimizer",
    "capture",
    "replication",
)
ALWAYS = {("in-optimizer", "ddp"), ("replication", "fsdp2")}
CELLS = [
    *((point, parallel) for point in POINTS for parallel in ("ddp", "fsdp2")),
    ("collective=2", "fsdp2"),  # gradients are reduced, after parameters were gathered
]


@pytest.mark.parametrize(
    ("point", "parallel"),
    [pytest.param(*cell, marks=() if cell in ALWAYS else pytest.mark.full) for cell in CELLS],
)
def test_a_host_lost_at_any_point_of_a_step_changes_no_bit(
    rig: Any, launch: Launch, point: str, parallel: str
) -> None:
    args = ("--parallel", parallel, "--steps", STEPS)
    job = launch(args, nnodes=3, options=("--inject", f"host-loss:rank=1@step={STRUCK},at={point}"))
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args, world_size=3)
    rig.check_one_owner(job, world_size=3)
    rig.check_survivors(job, replaced={1}, world_size=3)
    (done,) = job.named("recovery.done")
    rig.check_nothing_safe_lost(job, done, job.injections()[0]["monotonic_s"])
    check_agreement(job, done)


def check_agreement(job: Any, done: dict[str, Any]) -> None:
    """Every rank goes on from the same step."""
    for rank in range(3):
        again = [record["s"] for record in job.records(rank) if record["g"] == done["generation"]]
        assert min(again) == done["rollback_step"] + 1, f"rank {rank}"


@pytest.mark.full
def test_a_copy_that_arrived_in_part_is_never_offered(rig: Any, launch: Launch) -> None:
    """A19: the sender dies after part of its state has reached its holder; that copy is then needed."""
    args = ("--parallel", "fsdp2", "--steps", STEPS)
    job = launch(args, nnodes=3, options=("--inject", "host-loss:rank=2@step=6,at=replication"))
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args, world_size=3)
    (done,) = job.named("recovery.done")
    assert done["source"] == "replica"
    check_agreement(job, done)
