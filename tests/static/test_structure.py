"""Rules of the source tree that no type checker knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deadpool"

LEVELS = (
    ("core", "errors", "outlet", "words"),
    ("config", "events", "ports", "report"),
    ("snapshot", "store", "liveness", "membership", "communicator"),
    ("testing",),
    ("runtime",),
    ("api", "cli"),
    ("plugins", "__main__"),
)
"""Who stands on whom: a part imports itself and parts of the levels before its own, never one beside it."""

LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
MOST_LINES = 500

MACHINE_PATH = re.compile(r"""["'\s(=](/(?:home|root|work|Users|opt|mnt)/[\w.-]+)""")
"""A path of one person's machine. /proc, /dev and /sys are the same everywhere."""


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if "plugins" not in path.relative_to(ROOT).parts[1:]]


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "plugins":
        return "plugins"
    return relative.parts[1].removesuffix(".py")


def imported_parts(source: str, package: str) -> set[str]:
    """Parts of DeadPool that `source`, a module of `package`, imports, in functions and for types too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("deadpool.")} & LEVEL_OF.keys()


def package_of(path: Path) -> str:
    folders = path.relative_to(ROOT).parent.parts
    return ".".join(("deadpool", *folders) if folders[0] == "plugins" else folders)


def test_every_part_of_the_package_has_a_level() -> None:
    parts = {part_of(path) for path in python_files("deadpool", "plugins")} - {"__init__"}
    assert parts <= LEVEL_OF.keys()


def test_imports_go_one_way_and_siblings_do_not_import_one_another() -> None:
    wrong = []
    for path in python_files("deadpool", "plugins"):
        part = part_of(path)
        if part == "__init__":
            continue
        for other in imported_parts(path.read_text(encoding="utf-8"), package_of(path)) - {part}:
            if LEVEL_OF[other] >= LEVEL_OF[part]:
                wrong.append(f"{path.relative_to(ROOT)} ({part}) imports deadpool.{other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import deadpool.runtime.agent", "deadpool.store"),
        ("from deadpool.runtime import agent", "deadpool.store"),
        ("from deadpool import runtime", "deadpool.store"),
        ("from ..runtime.agent import Agent", "deadpool.store"),
        ("from .. import runtime", "deadpool.store"),
        ("def late():\n    from deadpool.runtime.agent import Agent", "deadpool.store"),
    ],
)
def test_the_import_rule_sees_every_form_of_import(source: str, package: str) -> None:
    assert imported_parts(source, package) == {"runtime"}


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    sources = [*python_files("deadpool", "plugins", "tests", "examples", "benchmarks")]
    sources += sorted((PACKAGE / "communicator" / "csrc").glob("*"))
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    long = [f"{path.relative_to(ROOT)}: {lines}" for path, lines in lengths.items() if lines > MOST_LINES]
    assert not long, "\n".join(long)


def test_no_path_of_one_machine_is_written_down() -> None:
    files = python_files("deadpool", "plugins", "tests", "examples", "benchmarks")
    files += [ROOT / "setup.py", ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "pyproject.toml"]
    files += [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(PACKAGE / "communicator" / "csrc").glob("*"),
    ]
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group(1)}"
        for path in files
        for found in MACHINE_PATH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


STATUS_HELP = """
import sys
sys.argv = ["deadpool", "status", "--help"]
from deadpool.cli.main import app
try:
    app()
except SystemExit as end:
    assert not end.code, end.code
"""
NOTHING_HEAVY = """
import sys
loaded = [name for name in ("torch", "numpy", "grpc") if name in sys.modules]
assert not loaded, loaded
"""


def import_all(folder: str) -> str:
    return "\n".join(f"import deadpool.{folder}.{path.stem}" for path in (PACKAGE / folder).glob("[!_]*.py"))


@pytest.mark.parametrize(
    "code",
    [import_all("core"), "import deadpool.errors, deadpool.config, deadpool.events", STATUS_HELP],
    ids=["deadpool.core", "errors, config and events", "deadpool status"],
)
def test_torch_is_not_loaded_by(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{NOTHING_HEAVY}"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
