"""DeadPool without its extension: a copy of the package that never was compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verifying import YES

ROOT = Path(__file__).parents[2]
SAYS_SO = "deadpool: the C++ extension is not built"


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without anything that a compiler made."""
    tree = tmp_path_factory.mktemp("uncompiled")
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "csrc")
    for folder in ("deadpool", "plugins", "tests", "examples"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def run(tree: Path, *command: str, limit_s: float = 170.0) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        text=True,
    )
    return done.returncode, done.stdout


def test_a_run_without_the_extension_says_so_with_the_remedy_and_trains(uncompiled: Path) -> None:
    code, output = run(
        uncompiled,
        *("-m", "deadpool", "run", "--standalone", "--nnodes", "2", "--spares", "0"),
        *("--run-dir", str(uncompiled / "run"), "tests/scenarios/toy.py", "--steps", "3"),
    )
    assert code == 0, output[-4000:]
    (line,) = [line for line in output.splitlines() if SAYS_SO in line]
    assert "install a C++ compiler" in line and "docs/fallback.md" in line


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_the_fallback_recovers_bit_for_bit(parallel: str, uncompiled: Path, tmp_path: Path) -> None:
    code, output = run(
        uncompiled,
        *("-m", "deadpool", "verify", "--standalone", "--nnodes", "2", "--spares", "2"),
        *("--inject", "sigkill:rank=1@step=5", "--inject", "sigstop:rank=0@step=9"),
        *("--run-dir", str(tmp_path / "verify"), "examples/train_gpt.py"),
        *("--parallel", parallel, "--steps", "14"),
        limit_s=280.0,
    )
    assert code == 0 and output.splitlines()[-1] == YES, output[-4000:]
    assert SAYS_SO in output


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_communicators_have_the_gaps_of_the_table_and_no_others(uncompiled: Path) -> None:
    tests = ("tests/process/communicator", "tests/unit/communicator")
    code, output = run(uncompiled, "-m", "pytest", "-p", "no:cacheprovider", *tests, limit_s=590.0)
    assert code == 0, output[-6000:]
    table = (ROOT / "docs" / "fallback.md").read_text(encoding="utf-8").partition("|---|---|\n")[2]
    documented = {row.split("|")[1].strip() for row in table.splitlines() if row.startswith("|")}
    assert set(re.findall(r"^XFAIL .* - docs/fallback.md: (.*)$", output, re.MULTILINE)) == documented


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_lost_host_is_replaced_without_the_extension_too(uncompiled: Path) -> None:
    test = "tests/scenarios/test_host_loss.py::test_a_lost_host_is_replaced_and_nothing_else_changes"
    code, output = run(uncompiled, "-m", "pytest", "-p", "no:cacheprovider", test, limit_s=590.0)
    assert code == 0, output[-6000:]
