"""That the checks for a GPU can be started; without one they say why they do nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "run.py"


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=SCRIPT.parents[2],
        env={**os.environ, **environment},
    )


def test_without_a_gpu_the_checks_import_everything_say_why_they_do_nothing_and_end_with_77() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 77, done.stderr
    assert "nothing was checked" in done.stderr and "sees no CUDA device" in done.stderr
    assert done.stdout == ""


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: see tests/gpu/run.py")
def test_every_check_holds_on_this_gpu() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["abort"]["holds"]
