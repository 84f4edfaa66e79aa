"""The random number generators of a process: python, numpy, torch and the device."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch


def read_rng() -> dict[str, Any]:
    """The state of every global generator, as plain values."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy.random" in sys.modules:
        state["numpy"] = np.random.get_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set every global generator back to what `read_rng` returned.

    Restored last: building a data iterator, a layer or a group may draw from these generators.
    """
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
