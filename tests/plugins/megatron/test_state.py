"""What is captured of megatron-core's state, and that a restored iteration is the same one."""

from __future__ import annotations

import gc

import pytest

from deadpool.snapshot.stateful import layout_of
from tests.plugins.megatron.drill import MakeDrill, aborting_at
from tests.unit.snapshot.support import Aborted, digest, keeping

LAYOUTS = [
    pytest.param((), id="fp32"),
    pytest.param(("--overlap",), id="fp32, overlap"),
    pytest.param(("--dtype", "bf16", "--overlap"), id="bf16, overlap"),
    pytest.param(("--dtype", "fp16"), id="fp16"),
    pytest.param(("--optimizer", "replicated"), id="fp32, replicated"),
    pytest.param(
        ("--optimizer", "replicated", "--dtype", "bf16", "--overlap"), id="bf16, replicated, overlap"
    ),
]


@pytest.mark.parametrize("options", LAYOUTS)
def test_moving_masters_and_moments_into_one_buffer_changes_no_bit(
    make_drill: MakeDrill, options: tuple[str, ...]
) -> None:
    plain = make_drill(*options)
    expected = plain.steps(4), plain.parameters()

    drill = make_drill(*options)
    before = drill.steps(2)
    state = drill.collect()
    assert (before + drill.steps(2), drill.parameters()) == expected
    assert [item.name for item in state.tensors if "optimizer" in item.name] == ["megatron.optimizer0"]


def test_the_buffer_has_twelve_bytes_per_parameter_and_nothing_else_is_unique(make_drill: MakeDrill) -> None:
    drill = make_drill("--dtype", "bf16")
    count = sum(param.numel() for param in drill.trainer.chunks[0].parameters())
    layout = layout_of(drill.collect())
    assert [buffer.nbytes for buffer in layout.buffers] == [12 * count]


@pytest.mark.parametrize("options", LAYOUTS)
def test_an_iteration_after_a_restore_is_the_iteration_before_it(
    make_drill: MakeDrill, options: tuple[str, ...]
) -> None:
    drill = make_drill(*options)
    state = drill.collect()
    with keeping(state) as keeper:
        drill.steps(2)
        blob = keeper.take(2)
        expected = drill.steps(3), drill.parameters(), digest(state)
        keeper.go_back(blob)
        assert (drill.steps(3), drill.parameters(), digest(state)) == expected


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize(
    "taken_after", [1, pytest.param(0, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_a_spare_that_was_just_built_goes_on_where_the_snapshot_was_taken(
    make_drill: MakeDrill, options: tuple[str, ...], taken_after: int
) -> None:
    drill = make_drill(*options)
    with keeping(drill.collect()) as keeper:
        drill.steps(taken_after)
        blob = keeper.take(taken_after)
        keeper.drain()
        expected = drill.steps(2), drill.parameters()

        spare = make_drill(*options)
        with keeping(spare.collect()) as theirs:
            theirs.banks = keeper.banks
            theirs.go_back(blob)
            assert (spare.steps(2), spare.parameters()) == expected


PLACES = [
    pytest.param("forward", (), marks=pytest.mark.full),
    pytest.param("forward", ("--overlap",), marks=pytest.mark.full),
    pytest.param("reduce-scatter", (), marks=pytest.mark.full),
    pytest.param("reduce-scatter", ("--overlap",)),
    pytest.param("gradient norm", ("--dtype", "bf16"), marks=pytest.mark.full),
    pytest.param("gather in the optimizer step", (), marks=pytest.mark.full),
    pytest.param("gather in the forward", ("--overlap", "--dtype", "bf16")),
]


@pytest.mark.parametrize(("place", "options"), PLACES)
@pytest.mark.parametrize("steps_before", [pytest.param(0, marks=pytest.mark.full), 2])
def test_an_iteration_that_was_aborted_is_run_again_as_if_nothing_had_been(
    make_drill: MakeDrill, place: str, options: tuple[str, ...], steps_before: int
) -> None:
    if place == "gather in the forward" and not steps_before:
        steps_before = 1  # the first iteration's parameters are complete
    drill = make_drill(*options)
    with keeping(drill.collect()) as keeper:
        drill.steps(steps_before)
        blob = keeper.take(steps_before)
        expected = drill.steps(2), drill.parameters()
        keeper.go_back(blob)
        drill.steps(min(steps_before, 1))  # right after a restore the parameters are complete
        with aborting_at(place, drill), pytest.raises(Aborted):
            drill.steps(2)
        gc.collect()
        keeper.go_back(blob)
        assert (drill.steps(2), drill.parameters()) == expected
