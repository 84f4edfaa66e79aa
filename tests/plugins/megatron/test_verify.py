"""Jobs on real megatron-core that lose ranks, compared bit for bit with undisturbed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verifying import check_script, check_verified

EXAMPLE = "examples/megatron_gpt.py"
LIMIT_S = 150.0
"""What one verify of the example may take."""

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


# The first commit is late by a fixed time, so the fault does not come in the first steps: they may be short.
@pytest.mark.parametrize(
    ("options", "inject"),
    [
        pytest.param(("--overlap", "--dtype", "bf16"), "sigkill:rank=1@step=12", id="DP2, overlap, bf16"),
        pytest.param(("--tp", "2"), "sigkill:rank=1@step=12", id="TP2"),
        pytest.param(("--pp", "2", "--vpp", "2"), "sigkill:rank=0@step=12", id="PP2, VPP2"),
    ],
)
def test_a_rank_of_two_is_lost(tmp_path: Path, options: tuple[str, ...], inject: str) -> None:
    check_script(EXAMPLE, tmp_path, 2, inject, *options, "--steps", "18", limit_s=LIMIT_S)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "inject"),
    [
        pytest.param((), "sigkill:rank=1@step=6", id="DP2"),
        pytest.param(("--dtype", "fp16"), "sigkill:rank=0@step=6", id="DP2, fp16"),
        pytest.param(("--optimizer", "replicated"), "sigkill:rank=0@step=6", id="DP2, replicated"),
        pytest.param(
            ("--optimizer", "replicated", "--dtype", "bf16", "--overlap"),
            "sigkill:rank=1@step=6",
            id="DP2, replicated, bf16, overlap",
        ),
        pytest.param(("--pp", "2"), "sigkill:rank=1@step=6", id="PP2"),
        pytest.param(("--tp", "2"), "sigstop:rank=0@step=6", id="TP2, stopped"),
        pytest.param(("--pp", "2"), "sigstop:rank=0@step=6", id="PP2, stopped"),
    ],
)
def test_a_rank_of_two_is_lost_in_24_steps(tmp_path: Path, options: tuple[str, ...], inject: str) -> None:
    check_script(EXAMPLE, tmp_path, 2, inject, *options, limit_s=LIMIT_S)


@pytest.mark.full
@pytest.mark.parametrize("options", [("--overlap", "--dtype", "bf16"), ("--pp", "2", "--vpp", "2")])
def test_after_one_rank_the_other_is_lost_too(tmp_path: Path, options: tuple[str, ...]) -> None:
    faults = "sigkill:rank=1@step=6 sigkill:rank=0@step=12"
    check_script(EXAMPLE, tmp_path, 2, faults, *options, spares=2, limit_s=LIMIT_S)


@pytest.mark.full
@pytest.mark.parametrize("options", [("--tp", "2"), ("--pp", "2")], ids=["DP2xTP2", "DP2xPP2"])
def test_of_two_dimensions_the_last_rank_and_then_the_first_are_lost(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    faults = "sigkill:rank=3@step=6 sigkill:rank=0@step=11"
    check_script(EXAMPLE, tmp_path, 4, faults, *options, "--steps", "14", spares=2, limit_s=LIMIT_S)


@pytest.mark.full
def test_groups_hooks_and_memory_are_as_before_after_two_recoveries(tmp_path: Path) -> None:
    faults = "sigkill:rank=3@step=6 sigkill:rank=0@step=11"
    script = "tests/plugins/megatron/layout_job.py"
    check_script(script, tmp_path, 4, faults, "--tp", "2", "--steps", "15", spares=2, limit_s=LIMIT_S)


@pytest.mark.full
def test_every_rank_of_two_tensor_and_two_pipeline_ranks_is_lost_once(tmp_path: Path) -> None:
    faults = " ".join(f"sigkill:rank={rank}@step={5 + 3 * rank}" for rank in range(4))
    options = ("--tp", "2", "--pp", "2", "--steps", "17")
    check_script(EXAMPLE, tmp_path, 4, faults, *options, spares=4, limit_s=LIMIT_S)


@pytest.mark.full
@pytest.mark.parametrize("options", [("--tp", "2"), ("--pp", "2")], ids=["DP2xTP2", "PP2xDP2"])
def test_a_host_with_two_ranks_is_lost(tmp_path: Path, options: tuple[str, ...]) -> None:
    check_verified(
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--spares",
        "1",
        "--run-dir",
        str(tmp_path),
        "--inject",
        "host-loss:rank=1@step=6",
        EXAMPLE,
        *options,
        "--steps",
        "12",
        limit_s=LIMIT_S,
    )


PLACES = (
    "before-forward",
    "collective=1",
    "collective=2",
    "collective=3",
    "before-optimizer",
    "in-optimizer",
    "after-optimizer",
)
"""The three collectives of a step are the reduce-scatter, that of the gradient norm, and the gather in the
optimizer's step; with overlap the first ones are gathers in the forward."""


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [(), ("--overlap", "--dtype", "bf16")], ids=["fp32", "overlap, bf16"])
def test_the_place_in_the_iteration_does_not_matter(
    tmp_path: Path, options: tuple[str, ...], place: str
) -> None:
    fault = f"sigkill:rank=1@step=6,at={place}"
    check_script(EXAMPLE, tmp_path, 2, fault, *options, "--steps", "10", limit_s=LIMIT_S)
