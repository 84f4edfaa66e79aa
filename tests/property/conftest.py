"""Loads the core afresh, with bugs seeded into its text."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType

import pytest

import deadpool

ROOT = Path(deadpool.__file__).parent
MODULES = (
    "core/types.py",
    "core/silence.py",
    "core/bitset.py",
    "core/placement.py",
    "core/plan.py",
    "core/commit.py",
    "core/follow.py",
    "core/membership_types.py",
    "core/recovery.py",
    "core/membership.py",
    "testing/oracle.py",
    "testing/banks.py",
    "testing/commit_world.py",
    "testing/commit_search.py",
    "testing/membership_world.py",
)
"""In an order in which each needs only those before it."""

Edit = tuple[str, str, str]
"""(module, old text, new text); the old text stands in the module exactly once."""

_counter = itertools.count()


@pytest.fixture
def load_core() -> Generator[Callable[[tuple[Edit, ...]], ModuleType], None, None]:
    """A function that loads core and worlds from edited text and gives back their package."""
    names: list[str] = []

    def add(name: str, module: ModuleType) -> None:
        sys.modules[name] = module
        names.append(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

    def load(edits: tuple[Edit, ...]) -> ModuleType:
        package = f"mutated_{next(_counter)}"
        for name in (package, f"{package}.core", f"{package}.testing"):
            module = ModuleType(name)
            module.__path__ = []
            add(name, module)
        for path in MODULES:
            source = (ROOT / path).read_text()
            for target, old, new in edits:
                if path.endswith(f"/{target}.py"):
                    assert source.count(old) == 1, f"{target}: the text to mutate is not there once:\n{old}"
                    source = source.replace(old, new)
            source = source.replace("from deadpool.", f"from {package}.")
            name = f"{package}.{path.removesuffix('.py').replace('/', '.')}"
            module = ModuleType(name)
            add(name, module)
            exec(compile(source, name, "exec"), module.__dict__)
        return sys.modules[package]

    yield load
    for name in names:
        sys.modules.pop(name, None)
