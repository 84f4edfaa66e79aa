"""The random number generators of a rank: python, numpy, torch, the device, and those of its objects.

[Note: when generators are restored]
Building a data iterator draws from them: a seed for workers, a permutation. `train` is entered again after a
restore and builds its iterator again, before its first step. So a snapshot taken inside the loop is
restored in two parts: everything else before `train` is entered, the generators when its loop takes the first
step. A snapshot taken before `train` was ever entered has nothing drawn yet: there they are set before.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


def read_global_rng() -> dict[str, Any]:
    """The state of every global generator, as plain values."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        # As an array: 625 numbers encoded one by one cost half of what a boundary costs the training thread.
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def find_generators(value: object) -> list[torch.Generator]:
    """The generators that an object holds: itself, or those of a data loader and its samplers."""
    if isinstance(value, torch.Generator):
        return [value]
    if not isinstance(value, DataLoader):
        return []
    holders = (value, value.sampler, value.batch_sampler, getattr(value.batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())


def restore_global_rng(state: dict[str, Any]) -> None:
    """Set every global generator back to what `read_global_rng` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
