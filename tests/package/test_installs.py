"""`deadpool.plugins` is importable from an editable install, from a wheel, and for a type checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deadpool.communicator.extension import MISSING

ROOT = Path(__file__).resolve().parents[2]
NOT_PART_OF_AN_EXPORT = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    "*.so",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "deadpool-runs",
)
SHOW_PLUGINS = "import deadpool.plugins as plugins; print(plugins.__file__)"


def run(*command: str | Path, cwd: Path, limit_s: float = 50, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an export without .git, and without the extension, to be quick."""
    export = tmp_path_factory.mktemp("export") / "deadpool"
    shutil.copytree(ROOT, export, symlinks=True, ignore=NOT_PART_OF_AN_EXPORT)
    out = tmp_path_factory.mktemp("wheel")
    command = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        out,
        ".",
    )
    run(*command, cwd=export, DEADPOOL_BUILD_EXT="0")
    (built,) = out.glob("deadpool-*.whl")
    return built


def test_plugins_are_imported_from_the_checkout(tmp_path: Path) -> None:
    shown = run(sys.executable, "-c", SHOW_PLUGINS, cwd=tmp_path)
    assert Path(shown.strip()).resolve() == ROOT / "plugins" / "__init__.py"


def test_plugins_are_imported_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        wheel,
        cwd=tmp_path,
    )
    shown = run(sys.executable, "-c", SHOW_PLUGINS, cwd=tmp_path, PYTHONPATH=str(target))
    assert Path(shown.strip()) == target / "deadpool" / "plugins" / "__init__.py"


def test_plugins_are_found_by_mypy(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text("import deadpool.plugins\nreveal_type(deadpool.plugins.__name__)\n", encoding="utf-8")
    command = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", user)
    assert "Success" in run(*command, cwd=tmp_path)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in packed} == {"deadpool"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "deadpool").rglob("*.py")}
    sources |= {f"deadpool/{path.relative_to(ROOT)}" for path in (ROOT / "plugins").rglob("*.py")}
    assert sources <= packed
    assert "deadpool/py.typed" in packed


def test_a_build_without_the_extension_says_so() -> None:
    said = run(sys.executable, ROOT / "setup.py", "--version", cwd=ROOT, DEADPOOL_BUILD_EXT="0")
    assert "deadpool.communicator._native is NOT built: DEADPOOL_BUILD_EXT=0 is set" in said


def test_a_build_that_finds_no_torch_says_what_to_do() -> None:
    setup = ROOT / "setup.py"
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--version']; "
        f"runpy.run_path({str(setup)!r}, run_name='__main__')"
    )
    said = run(sys.executable, "-c", code, cwd=ROOT)
    assert "torch cannot be imported in the build environment" in said
    assert "pip install --no-build-isolation" in said


def test_the_extension_that_was_compiled_here_is_the_one_in_use() -> None:
    assert MISSING == "", "communicators run on the fallback: what the other tests say holds for that"


@pytest.mark.full
@pytest.mark.timeout(180)
def test_the_installation_goes_on_where_nothing_can_be_compiled_and_says_so(tmp_path: Path) -> None:
    export = tmp_path / "deadpool"
    shutil.copytree(ROOT, export, symlinks=True, ignore=NOT_PART_OF_AN_EXPORT)
    no_compiler = str(tmp_path / "no-compiler")
    command = (sys.executable, "setup.py", "build_ext", "--inplace")
    output = run(*command, cwd=export, CC=no_compiler, CXX=no_compiler, limit_s=150)
    assert "_native is NOT built: it could not be compiled" in output
    assert "fallback in Python (docs/fallback.md)" in output
    assert not list(export.rglob("*.so"))
