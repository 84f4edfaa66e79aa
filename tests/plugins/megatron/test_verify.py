"""Jobs on real megatron-core that lose ranks, compared bit for bit with undisturbed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verifying import check_verified

LIMIT_S = 150.0
"""What one verify of the example may take."""


def check_example(folder: Path, nnodes: int, inject: str, *options: str, spares: int = 1) -> None:
    """The example of 24 steps with faults, separated by spaces, is bit-identical to one without."""
    injections = [word for fault in inject.split() for word in ("--inject", fault)]
    check_verified(
        "--nnodes",
        str(nnodes),
        "--spares",
        str(spares),
        "--run-dir",
        str(folder),
        *injections,
        "examples/megatron_gpt.py",
        *options,
        limit_s=LIMIT_S,
    )


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_data_parallel_rank_is_lost(tmp_path: Path) -> None:
    check_example(tmp_path, 2, "sigkill:rank=1@step=6")
