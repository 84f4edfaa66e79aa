"""Every entry of the reset list is needed: without it something goes wrong."""

from __future__ import annotations

import pytest

from tests.plugins.megatron.drill import Drill, aborting_at, outcome
from tests.unit.snapshot.support import Aborted, keeping

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


PLACES = ["batch of collectives", "reduce-scatter", "middle of the forward", "last backward"]


@pytest.mark.parametrize(
    ("entry", "place", "steps_before"),
    [
        ("forget_coalescing", "batch of collectives", 2),
        ("forget_grad_reduction", "reduce-scatter", 2),
        ("forget_param_gather", "middle of the forward", 2),
        ("forget_ready_counts", "last backward", 0),
        ("drop_gradients", "last backward", 2),
        *((None, place, steps) for place in PLACES for steps in (0, 2)),  # the whole list: nothing goes wrong
    ],
)
def test_without_one_entry_of_the_reset_list_the_iteration_is_another_one(
    shared_drill: Drill, monkeypatch: pytest.MonkeyPatch, entry: str | None, place: str, steps_before: int
) -> None:
    from deadpool.plugins.megatron import reset

    drill = shared_drill
    monkeypatch.setattr(drill, "zeroes_last", True)  # the harder way: nothing is zeroed as a step begins
    with keeping(drill.collect()) as keeper:
        beginning = keeper.take(0, bank=1)
        drill.steps(steps_before)
        blob = keeper.take(steps_before)
        keeper.go_back(blob)
        expected = outcome(drill)
        keeper.go_back(blob)
        assert {each.__name__ for each in reset.RESETS} >= {entry} - {None}
        fewer = tuple(each for each in reset.RESETS if each.__name__ != entry)
        drill.steps(min(steps_before, 1))  # right after a restore the parameters are complete
        with aborting_at(place, drill), pytest.raises(Aborted):
            drill.steps(2)
        with monkeypatch.context() as patch:
            patch.setattr(reset, "RESETS", fewer)
            try:
                keeper.go_back(blob)
                found = outcome(drill)
            except AssertionError as error:  # some entries protect others
                found = repr(error)
        keeper.go_back(beginning, bank=1)
    assert (found == expected) is (entry is None)
