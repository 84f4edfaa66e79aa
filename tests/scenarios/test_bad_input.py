"""Bad input: one clear message with the remedy, the documented code, nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]

HEAD = """
import torch
from torch.nn.parallel import DistributedDataParallel
import deadpool

deadpool.init()
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())


def train(ft):
    for _ in ft.steps(3):
        pass


"""


STEPS = "ft.steps(3):\n        pass"
SLOW_STEPS = "ft.steps(20):\n        __import__('time').sleep(0.1)"

STATEFUL = """
class Stateful:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"inner": [self.value]}

    def load_state_dict(self, state):
        self.value = state["inner"][0]


"""


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "deadpool", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--standalone", "--sparse", "1", "x.py"], "--sparse"),
        (["--standalone", "--inject", "explode:rank=0@step=1", "x.py"], "unknown kind 'explode'"),
        (["--standalone", "--nnodes", "2", "--inject", "sigkill:rank=5@step=1", "x.py"], "ranks are 0 to 1"),
        (["--standalone", "--nnodes", "2", "missing.py"], "is not a file"),
    ],
)
def test_what_the_command_line_can_see_is_refused_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    script = tmp_path / "x.py"
    script.write_text(HEAD)
    code, output = run(*[str(script) if each == "x.py" else each for each in arguments])
    assert code == 2
    assert says in output
    assert "Traceback" not in output


def test_etcd_that_does_not_answer_ends_with_code_5(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text(HEAD)
    code, output = run(
        *("--etcd", "127.0.0.1:1", "--job-id", "nobody", "--nnodes", "2"),
        *("--run-dir", str(tmp_path / "run"), str(script)),
    )
    assert code == 5, output
    assert "control plane unreachable" in output
    assert "127.0.0.1:1" in output


@pytest.mark.parametrize(
    ("wrapped", "says"),
    [
        ("data=iter([1, 2])", "a bare iterator"),
        ("data=object()", "state_dict"),
        ("data=torch.utils.data.DataLoader([1, 2])", "StatefulDataLoader"),
        pytest.param(
            "counter=Stateful(len)",
            "counter.state_dict()['inner'][0] is a builtins.builtin_function",
            marks=pytest.mark.full,
        ),
    ],
)
def test_state_that_cannot_be_protected_ends_the_job_at_once_with_code_2(
    wrapped: str, says: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    script = tmp_path / "bad.py"
    script.write_text(
        f"{HEAD}{STATEFUL}deadpool.wrap(train, model=model, optimizer=optimizer, {wrapped})()\n"
    )
    code, output = run_standalone(tmp_path, script)
    assert code == 2, output
    assert says in output


def test_ranks_that_built_different_states_end_the_job_with_code_2(tmp_path: Path) -> None:
    script = tmp_path / "unlike.py"
    script.write_text(
        HEAD.replace(
            "torch.optim.AdamW(model.parameters())",
            "[torch.optim.AdamW, torch.optim.RMSprop][torch.distributed.get_rank()](model.parameters())",
        )
        + "deadpool.wrap(train, model=model, optimizer=optimizer)()\n"
    )
    code, output = run_standalone(tmp_path, script)
    assert code == 2, output
    assert "built different states" in output
    assert re.search(r"exp_avg\b.*: nothing on rank 1, float32 \[.*\] on the others", output), output


@pytest.mark.full
def test_a_checkpoint_of_another_model_ends_the_job_with_code_2(tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "1")
    for width, expected in ((4, 0), (5, 2)):
        script = tmp_path / f"width-{width}.py"
        script.write_text(
            HEAD.replace("Linear(4, 4)", f"Linear({width}, 4)").replace(STEPS, SLOW_STEPS)
            + "deadpool.wrap(train, model=model, optimizer=optimizer)()\n"
        )
        code, output = run_standalone(tmp_path / str(width), script, *checkpoints)
        assert code == expected, output
        assert list((tmp_path / "checkpoints").glob("*/manifest.json"))
    assert "does not fit the state" in output
    assert "weight: here float32[4, 5]" in output
    assert ", stored float32[4, 4]" in output
    assert "give another --checkpoint-dir" in output


def run_standalone(folder: Path, script: Path, *options: str) -> tuple[int, str]:
    hosts = ("--standalone", "--nnodes", "2", "--spares", "0", "--run-dir", str(folder / "run"))
    return run(*hosts, *options, str(script))
