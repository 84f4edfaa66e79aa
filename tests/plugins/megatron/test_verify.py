"""Jobs on real megatron-core that lose ranks, compared bit for bit with undisturbed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verifying import check_script

LIMIT_S = 150.0
"""What one verify of the example may take."""


def check_example(folder: Path, nnodes: int, inject: str, *options: str, spares: int = 1) -> None:
    """The example of 24 steps with faults, separated by spaces, is bit-identical to one without."""
    script = "examples/megatron_gpt.py"
    check_script(script, folder, nnodes, inject, *options, spares=spares, limit_s=LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_data_parallel_rank_is_lost(tmp_path: Path) -> None:
    check_example(tmp_path, 2, "sigkill:rank=1@step=6")
