"""After two recoveries nothing is doubled or stale, memory is flat, and checkpoints work throughout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.verifying import check_script

JOB = "tests/plugins/deepspeed/job.py"


@pytest.mark.full
@pytest.mark.timeout(260)
@pytest.mark.parametrize("stage", ["1", "3"])
def test_counters_hooks_groups_and_memory_are_as_in_an_undisturbed_run(stage: str, tmp_path: Path) -> None:
    """Every count is recorded at each step, and compared with those of a run without faults.

    Checkpoints are saved before the first recovery and after the second; the script loads both at its end.
    """
    check_script(
        JOB,
        tmp_path / "run",
        3,
        "sigkill:rank=1@step=5 sigkill:rank=1@step=8",
        "--stage",
        stage,
        "--folder",
        str(tmp_path),
        spares=2,
        limit_s=250.0,
    )
    lines = [json.loads(line) for line in (tmp_path / "memory-0.jsonl").read_text().splitlines()]
    survivor = [line for line in lines if line["pid"] == lines[-1]["pid"]]
    assert survivor[-1]["generation"] == 3
    second = [line["bytes"] for line in survivor if line["generation"] == 2]
    third = [line["bytes"] for line in survivor if line["generation"] == 3]
    assert third[-1] <= 1.05 * second[-1]
