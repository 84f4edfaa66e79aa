"""A loop of single steps runs its last steps again from the inputs and generators that it kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]


@pytest.mark.full
def test_a_step_that_is_run_again_begins_with_the_generators_its_batch_left(rig: Any, launch: Launch) -> None:
    """The kept batch is not drawn again, so what drawing it took from the global generators must be taken."""
    args = ("--api", "wrap_step", "--noise", "0.1", "--steps", "14")
    job = launch(args, nnodes=3, options=("--inject", "host-loss:rank=1@step=7"))
    assert job.wait() == 0, job.output[-4000:]
    assert len(job.named("recovery.done")) == 1
    undisturbed = rig.undisturbed(args, 3)
    for rank in range(3):
        assert job.digests(rank)["final"] == undisturbed.digests(rank)["final"]
        assert job.digests(rank)["blob"] == undisturbed.digests(rank)["blob"]
    rig.check_survivors(job, replaced={1}, world_size=3)
