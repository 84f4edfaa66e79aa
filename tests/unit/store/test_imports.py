"""Workers, agents and admin commands import the store: it must be light, and know nothing of its siblings."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
import deadpool.store
for module in pkgutil.iter_modules(deadpool.store.__path__):
    importlib.import_module(f"deadpool.store.{module.name}")
allowed = ("deadpool.core", "deadpool.errors", "deadpool.ports", "deadpool.store")
loaded = [name for name in sys.modules if name.startswith("deadpool.") and not name.startswith(allowed)]
print(loaded, "torch" in sys.modules, "numpy" in sys.modules)
"""


def test_the_store_imports_no_torch_and_no_sibling() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("[] False False\n", "")
