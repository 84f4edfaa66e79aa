"""Jobs on real DeepSpeed that lose ranks, compared bit for bit with undisturbed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verifying import check_script

LIMIT_S = 150.0
"""What one verify of the example may take."""

FAULT = "sigkill:rank=1@step=6"


def check_example(folder: Path, inject: str, *options: str, nnodes: int = 3, spares: int = 1) -> None:
    check_script(
        "examples/deepspeed_gpt.py", folder, nnodes, inject, *options, spares=spares, limit_s=LIMIT_S
    )


# By default four runs that together have every value of the combinations below, short ones. The fault comes
# when steps are committed already: one takes 30 ms, and the first capture some of them.


@pytest.mark.timeout(LIMIT_S + 10)
def test_without_zero_rank_0_is_lost(tmp_path: Path) -> None:
    options = ("--stage", "0", "--dtype", "fp32", "--grad-accum", "2", "--steps", "40")
    check_example(tmp_path, "sigkill:rank=0@step=25", *options, nnodes=2)


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_rank_of_a_pipeline_of_two_stages_is_lost(tmp_path: Path) -> None:
    options = ("--stage", "1", "--pp", "2", "--dtype", "bf16", "--grad-accum", "2", "--steps", "40")
    check_example(tmp_path, "sigkill:rank=1@step=25", *options, nnodes=4)


@pytest.mark.timeout(LIMIT_S + 10)
def test_in_stage_2_a_rank_is_lost(tmp_path: Path) -> None:
    options = ("--stage", "2", "--dtype", "fp32", "--no-overlap-comm", "--steps", "40")
    check_example(tmp_path, "sigkill:rank=1@step=25", *options, nnodes=2)


@pytest.mark.timeout(LIMIT_S + 10)
def test_in_stage_3_the_spare_that_took_over_is_lost_too(tmp_path: Path) -> None:
    options = ("--stage", "3", "--dtype", "bf16", "--overlap-comm", "--steps", "40")
    faults = "sigkill:rank=1@step=15 sigkill:rank=1@step=28"
    check_example(tmp_path, faults, *options, nnodes=2, spares=2)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("overlap", ["--overlap-comm", "--no-overlap-comm"])
@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_rank_is_lost_with_each_combination_of_settings(
    stage: str, dtype: str, accumulate: str, overlap: str, tmp_path: Path
) -> None:
    check_example(tmp_path, FAULT, "--stage", stage, "--dtype", dtype, "--grad-accum", accumulate, overlap)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_stopped_rank_is_replaced(stage: str, tmp_path: Path) -> None:
    check_example(tmp_path, "sigstop:rank=1@step=6", "--stage", stage)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_rank_0_is_lost(stage: str, tmp_path: Path) -> None:
    check_example(tmp_path, "sigkill:rank=0@step=6", "--stage", stage)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("stage", ["1", "3"])
def test_two_losses_in_a_row_the_second_of_the_former_spare(stage: str, tmp_path: Path) -> None:
    check_example(tmp_path, f"{FAULT} sigkill:rank=1@step=11", "--stage", stage, spares=2)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", ["0", "1"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_either_end_of_a_pipeline_is_lost(
    stage: str, dtype: str, rank: int, tmp_path: Path
) -> None:
    options = ("--stage", stage, "--pp", "2", "--dtype", dtype, "--grad-accum", "4")
    check_example(tmp_path, f"sigkill:rank={rank}@step=6", *options, nnodes=4)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize(
    ("stage", "call"),
    [
        ("1", 2),
        ("1", 10),
        ("1", 11),
        ("2", 2),
        ("2", 10),
        ("2", 11),
        ("3", 2),
        ("3", 7),
        ("3", 14),
        ("3", 16),
    ],
)
def test_a_rank_dies_at_each_kind_of_collective(stage: str, call: int, tmp_path: Path) -> None:
    """Stages 1 and 2: 9 to reduce, 1 for the norm, 1 to gather. Stage 3: 5 to fetch, 8, 1, 14."""
    check_example(tmp_path, f"{FAULT},at=collective={call}", "--stage", stage)
