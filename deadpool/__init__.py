"""DeadPool: hot-swap fault tolerance for torch.distributed training.

Public names are loaded on first use, so that `import deadpool.core` and the admin commands never
load torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "init": "deadpool.api",
    "wrap": "deadpool.api",
    "wrap_step": "deadpool.api",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'deadpool' has no attribute {name!r}")
