"""Every fault, in every phase, to every kind of host: the job goes on, within a bound."""

from __future__ import annotations

import itertools

import pytest

from deadpool.core.types import Phase
from deadpool.testing.simulation import Happening, Injection, Result, Setup, Target
from deadpool.testing.simulator import simulate

PHASES = [Phase.FORMING, Phase.RUNNING, Phase.ABORTING, Phase.STALLED, Phase.RESTORING]
FIRST_FAULT = Injection(happening=Happening.WORKER_EXIT, phase=Phase.RUNNING, target=Target.OTHER)
FIRST_LOSS = Injection(happening=Happening.HOST_LOSS, phase=Phase.RUNNING, target=Target.OTHER)
BOUND_S = 900.0
"""Two recoveries at their slowest: the abort's limit, the patience with an only copy, two restores."""


def run(happening: Happening, phase: Phase, target: Target, seed: int) -> Result:
    """A job in which something happens; to reach the later phases something else happens before."""
    injections = [Injection(happening=happening, phase=phase, target=target)]
    if phase not in (Phase.FORMING, Phase.RUNNING):
        injections.insert(0, FIRST_FAULT if target is Target.LEAVING else FIRST_LOSS)
    setup = Setup(
        hosts=6,
        nproc=2,
        spares=0 if phase is Phase.STALLED else 3,
        seed=seed,
        last_step=20,
        return_s=20.0,
        arrivals_s=(100.0, 150.0),
        injections=tuple(injections),
    )
    return simulate(setup)


def is_possible(phase: Phase, target: Target, happening: Happening) -> bool:
    if happening is Happening.SPARE_FAILED and target not in (Target.SPARE, Target.JOINING):
        return False
    if target is Target.JOINING:
        return phase in (Phase.ABORTING, Phase.RESTORING)
    if target is Target.LEAVING:
        return phase in (Phase.ABORTING, Phase.RESTORING)
    if target is Target.SPARE:
        return phase is not Phase.STALLED
    return target is not Target.OTHER or phase in (Phase.FORMING, Phase.RUNNING)


CELLS = [
    cell for cell in itertools.product(Happening, PHASES, Target) if is_possible(cell[1], cell[2], cell[0])
]


@pytest.mark.parametrize("happening", Happening, ids=lambda happening: happening.value)
def test_the_job_finishes_whatever_happens_to_whomever_and_whenever(happening: Happening) -> None:
    for cell in CELLS:
        if cell[0] is happening:
            for seed in range(3):
                result = run(*cell, seed=seed)
                where = f"{[part.value for part in cell]}, seed {seed}: {result}"
                assert (result.phase, result.exit_code) == (Phase.FINISHED, 0), where
                assert result.injected >= 1, where
                assert result.virtual_s < BOUND_S, where


def test_the_matrix_is_whole() -> None:
    assert len(CELLS) > 150
    assert {cell[0] for cell in CELLS} == set(Happening)
    assert {cell[1] for cell in CELLS} == set(PHASES)
    assert {cell[2] for cell in CELLS} == set(Target)
