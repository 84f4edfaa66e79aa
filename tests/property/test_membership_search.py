"""The membership machine in every world of a few hosts and faults, against the oracle."""

from __future__ import annotations

import pytest

from deadpool.core.types import FaultKind, Phase
from deadpool.testing.membership_world import (
    Setup,
    World,
    check_bounded,
    initial_world,
    moves,
    search,
)

ALL_PHASES = {Phase.RUNNING, Phase.ABORTING, Phase.RESTORING, Phase.STALLED, Phase.HALTED}
WORKER_KINDS = [
    FaultKind.WORKER_EXIT,
    FaultKind.USER_ERROR,
    FaultKind.DEVICE,
    FaultKind.COLLECTIVE,
    FaultKind.SPARE_FAILED,
    FaultKind.BAD_INPUT,
]

WORLDS = {
    "two hosts die": Setup(kills=2),
    "two of two hosts die, and two join": Setup(slots=2, spares=0, kills=2, joins=2),
    "a host dies and one joins": Setup(kills=1, joins=1),
    "a host dies and nobody answers": Setup(kills=1, deadlines=2, last_step=0),
    "a host dies and another leader takes over": Setup(kills=1, elections=1),
    "two hosts die and there is a checkpoint": Setup(kills=2, checkpoint=True),
    "two hosts die and their state is replicated": Setup(kills=2, replicated=(0, 1, 2)),
    "both owners of replicated bytes die": Setup(slots=4, spares=0, kills=2, replicated=(0, 2), last_step=0),
    "two ranks per host": Setup(slots=2, nproc=2, kills=2, last_step=2),
    "the same user error again": Setup(faults=2, fault_kinds=(FaultKind.USER_ERROR,)),
}

LONG = {
    "three hosts die and two join": Setup(kills=3, joins=2, last_step=0),
    "two hosts die, others join, another leader takes over": Setup(kills=2, joins=1, elections=1),
    "two workers are lost": Setup(faults=2, spares=2, last_step=0),
    "a host dies, a worker is lost, one joins": Setup(kills=1, faults=1, joins=1, last_step=0),
    "two hosts die and nobody answers": Setup(kills=2, deadlines=2, last_step=0),
}


@pytest.mark.parametrize("setup", WORLDS.values(), ids=WORLDS.keys())
def test_every_reachable_world_satisfies_the_oracle(setup: Setup) -> None:
    verdict = search(setup)
    assert not verdict.violation, "\n".join([verdict.violation, *verdict.path])


@pytest.mark.parametrize("kind", WORKER_KINDS, ids=lambda kind: kind.value)
def test_a_fault_of_any_kind_beside_a_death_satisfies_the_oracle(kind: FaultKind) -> None:
    verdict = search(Setup(kills=1, faults=1, fault_kinds=(kind,), last_step=0))
    assert not verdict.violation, "\n".join([verdict.violation, *verdict.path])


@pytest.mark.full
@pytest.mark.parametrize("setup", LONG.values(), ids=LONG.keys())
def test_every_reachable_larger_world_satisfies_the_oracle(setup: Setup) -> None:
    verdict = search(setup)
    assert not verdict.violation, "\n".join([verdict.violation, *verdict.path])


def test_the_search_reaches_every_phase() -> None:
    assert search(Setup(kills=2)).phases == ALL_PHASES


def test_whatever_happens_deadlines_alone_bring_the_job_out_of_every_phase() -> None:
    setup = Setup(kills=2, last_step=0)
    seen: set[World] = {initial_world(setup)}
    frontier = list(seen)
    while frontier:
        world = frontier.pop()
        check_bounded(world)
        for _, after in moves(world, setup):
            if after not in seen:
                seen.add(after)
                frontier.append(after)
    assert len(seen) > 500
