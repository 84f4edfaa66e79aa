"""Named capture in every world of a few hosts and steps: nothing claimed is ever lost, and commits go on."""

from __future__ import annotations

import pytest

from deadpool.testing.commit_search import Verdict, search
from deadpool.testing.commit_world import Setup

SAFE = {
    "one leader": Setup(last_step=4),
    "a host dies": Setup(last_step=3, faults=1),
    "a host dies or a generation opens without a loss": Setup(last_step=3, faults=1, spurious=True),
    "two faults": Setup(last_step=2, faults=2, spurious=True),
    "a capture or a stream fails": Setup(last_step=3, failures=1),
    "two leaders": Setup(last_step=2, elections=True),
    "two leaders, more steps": Setup(last_step=3, elections=True, coarse=True),
    "three hosts": Setup(hosts=3, last_step=2, coarse=True),
    "three hosts, one dies": Setup(hosts=3, last_step=1, faults=1, coarse=True),
    "other holders are chosen": Setup(hosts=3, last_step=0, faults=2, spurious=True, reholds=True),
    "messages of an older generation arrive": Setup(
        last_step=1, faults=1, stale=True, reduced=False, coarse=True
    ),
}

LONG = {
    "a host dies, and a capture or a stream fails": Setup(last_step=3, faults=1, failures=1),
    "two leaders, and a host dies": Setup(last_step=2, elections=True, faults=1, coarse=True),
    "other holders are chosen, and steps are captured": Setup(
        hosts=3, last_step=1, faults=2, spurious=True, reholds=True, coarse=True
    ),
    "three steps and two faults": Setup(last_step=3, faults=2, spurious=True),
    "two leaders, all orders of their messages": Setup(
        last_step=2, elections=True, coarse=True, reduced=False
    ),
}


def check(verdict: Verdict) -> None:
    assert not verdict.violation, "\n".join([verdict.violation, *verdict.path])
    assert verdict.is_exhaustive


@pytest.mark.parametrize("setup", SAFE.values(), ids=SAFE.keys())
def test_no_reachable_world_breaks_a_claim(setup: Setup) -> None:
    check(search(setup))


@pytest.mark.full
@pytest.mark.parametrize("setup", LONG.values(), ids=LONG.keys())
def test_no_reachable_larger_world_breaks_a_claim(setup: Setup) -> None:
    check(search(setup))


@pytest.mark.parametrize(
    "setup",
    [
        Setup(last_step=3),
        Setup(last_step=4),
        Setup(last_step=3, failures=1),
        Setup(last_step=3, faults=1),
        Setup(last_step=3, elections=True, coarse=True),
    ],
    ids=["undisturbed", "more steps", "a failure", "a death", "two leaders"],
)
def test_from_every_world_the_last_step_can_still_be_committed(setup: Setup) -> None:
    verdict = search(setup, checks_progress=True)
    check(verdict)
    assert verdict.best_commit == setup.last_step
    assert verdict.stuck == 0
