"""A15: two by two ranks in tensor and data groups: who replaces a rank takes its place in every group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deadpool.testing.cluster import Job

Launch = Callable[..., Job]


@pytest.mark.full
def test_a_replaced_rank_has_its_old_place_in_every_subgroup(rig: Any, launch: Launch) -> None:
    """In every step each rank sends its logical id through its groups; the sums depend on their order."""
    args = ("--groups", "--steps", "40")
    job = launch(
        args,
        spares=2,
        options=("--inject", "host-loss:rank=3@step=6", "--inject", "host-loss:rank=0@step=22"),
    )
    assert job.wait() == 0, job.output[-4000:]
    rig.check_trace(job, args)
    rig.check_one_owner(job)
    rig.check_survivors(job, replaced={0, 3})
    assert len(job.named("recovery.done")) == 2
    slots = [event["slots"] for event in job.named("view.published") if event["phase"] == "running"]
    for before, after, struck in ((slots[0], slots[1], 3), (slots[1], slots[2], 0)):
        assert {slot for slot in range(4) if before[slot] != after[slot]} == {struck}
