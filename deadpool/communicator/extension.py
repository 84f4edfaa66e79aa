"""The native part of communicators: the C++ extension, or its fallback in Python where that is missing.

`native` is one of two modules with the same names; _native.pyi describes them. The extension belongs to one
version of torch, so it is not used with another. `deadpool run` says when there is none.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deadpool.communicator import _native as native
    from deadpool.communicator._native import SwapBackend

    MISSING: str

else:
    try:
        from deadpool.communicator import _native as native

        MISSING = ""
        _version = str(torch.__version__).split("+")[0]
        if native.torch_version != _version:
            MISSING = f"it was built for torch {native.torch_version}, this is torch {_version}"
    except ImportError as error:
        MISSING = str(error)
    if MISSING:
        from deadpool.communicator import fallback as native
    SwapBackend = native.SwapBackend

__all__ = ["MISSING", "SwapBackend", "native", "say_if_foreign"]


def say_if_foreign() -> None:
    """Print one line if there is an extension, but of another torch: `deadpool run` cannot see that."""
    if MISSING and importlib.util.find_spec("deadpool.communicator._native") is not None:
        print(
            f"deadpool: the C++ extension does not fit ({MISSING}), communicators run on the fallback in "
            "Python (docs/fallback.md); install DeadPool again with --no-build-isolation",
            file=sys.stderr,
            flush=True,
        )
