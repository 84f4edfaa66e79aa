"""The core decides and touches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deadpool.core

FORBIDDEN = {
    "asyncio",
    "datetime",
    "io",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
    "uuid",
}
FILES = sorted(Path(deadpool.core.__file__).parent.glob("*.py"))


def imported_modules(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_core_imports_only_itself_and_the_harmless_part_of_the_standard_library(path: Path) -> None:
    for module in imported_modules(path.read_text()):
        root = module.partition(".")[0]
        is_own = module == "deadpool.core" or module.startswith("deadpool.core.")
        assert is_own or (root in sys.stdlib_module_names and root not in FORBIDDEN), module


def test_the_core_has_no_reach_into_the_world_by_built_in_functions() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"open", "print", "input", "exec", "eval", "__import__"}, path


def test_the_core_loads_without_torch() -> None:
    code = "import sys, deadpool.core.membership, deadpool.core.follow; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
