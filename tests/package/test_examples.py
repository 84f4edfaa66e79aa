"""The examples run as plain processes, without `deadpool run`, and say that they are unprotected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PNG = b"\x89PNG\r\n"


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_smallest_example_learns_and_says_once_that_it_is_unprotected(tmp_path: Path) -> None:
    done = run("minimal.py", cwd=tmp_path)
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] / 2
    assert done.stderr.count("UNPROTECTED") == 1


def test_the_gpt_on_deepspeed_trains_in_one_process_and_needs_no_variables(tmp_path: Path) -> None:
    done = run("deepspeed_gpt.py", "--stage", "3", "--steps", "4", cwd=tmp_path)
    assert "step 4: loss" in done.stdout
    assert done.stderr.count("UNPROTECTED") == 1


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_the_gpt_trains_and_draws_its_loss_in_one_process(parallel: str, tmp_path: Path) -> None:
    options = ("--steps", "3", "--grad-accum", "2", "--num-workers", "1", "--plot", "loss.png")
    done = run("train_gpt.py", "--parallel", parallel, *options, cwd=tmp_path)
    assert "3/3" in done.stderr
    assert "the model writes:\ndef " in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
