"""Wheel and sdist, each with its extension, installed into an empty environment outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

import deadpool
from tests.package.test_installs import NOT_PART_OF_AN_EXPORT, ROOT

BUILD_S = 900.0
RUN_S = 120.0
SHOW_PLACES = """
import torch  # whose libraries the extension needs
import deadpool, deadpool.plugins, deadpool.testing.cluster, deadpool.communicator._native as native
print(deadpool.__file__, deadpool.plugins.__file__, native.__file__, sep="\\n")
"""


def run(*command: str | Path, cwd: Path, timeout_s: float = RUN_S) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | {"DEADPOOL_BUILD_EXT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    export = tmp_path_factory.mktemp("export") / "deadpool"
    shutil.copytree(ROOT, export, symlinks=True, ignore=NOT_PART_OF_AN_EXPORT)
    out = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out)!r}))"
    run(sys.executable, "-c", code, cwd=export)
    (built,) = out.glob("deadpool-*.tar.gz")
    return built


def make_environment(folder: Path) -> Path:
    """A virtual environment with what DeadPool depends on, and nothing of DeadPool; returns its bin folder.

    The dependencies are those of this environment, found over a path.
    An editable DeadPool is not seen so, since path files are read in an environment's own folder only.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    blank = subprocess.run(
        [folder / "bin" / "python", "-c", "import deadpool"], cwd=folder, env={}, timeout=50
    )
    assert blank.returncode != 0, "the empty environment has a DeadPool already"
    return folder / "bin"


def install(bin_folder: Path, distribution: Path) -> None:
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir")
    pip = (sys.executable, "-m", "pip", "--python", bin_folder / "python", "install", *options)
    run(*pip, distribution, cwd=bin_folder, timeout_s=BUILD_S)


def test_the_sdist_has_what_a_build_and_a_reader_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "deadpool").rglob("*.py")}
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "deadpool/communicator/csrc").glob("*.*")}
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    sources |= {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "examples/minimal.py"}
    sources |= {"deadpool/py.typed", "deadpool/communicator/_native.pyi", "plugins/README.md"}
    sources |= {"deadpool/cli/slurm/deadpool.sbatch", "slurm/deadpool.sbatch", "slurm/README.md"}
    assert {name for name in sources if name not in names} == set()
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


@pytest.mark.full
@pytest.mark.timeout(2 * BUILD_S)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_distribution_runs_the_smallest_example(sdist: Path, tmp_path: Path, kind: str) -> None:
    bin_folder = make_environment(tmp_path / "environment")
    distribution = sdist
    if kind == "wheel":
        wheel = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
        run(*wheel, "--no-cache-dir", "-w", tmp_path / "wheel", sdist, cwd=tmp_path, timeout_s=BUILD_S)
        (distribution,) = (tmp_path / "wheel").glob("deadpool-*.whl")
    install(bin_folder, distribution)

    places = run(bin_folder / "python", "-c", SHOW_PLACES, cwd=tmp_path).split()
    assert len(places) == 3
    assert all(Path(place).is_relative_to(bin_folder.parent) for place in places), places
    assert (
        run(bin_folder / "deadpool", "--version", cwd=tmp_path).strip() == f"deadpool {deadpool.__version__}"
    )
    assert "#SBATCH --no-kill" in run(bin_folder / "deadpool", "slurm", "template", cwd=tmp_path)
    example = tmp_path / "mine.py"
    shutil.copy(ROOT / "examples" / "minimal.py", example)
    said = run(
        *(bin_folder / "deadpool", "run", "--standalone", "--nnodes", "2", "--spares", "1"),
        *("--run-dir", tmp_path / "run", example),
        cwd=tmp_path,
    )
    assert "step 100: loss" in said
