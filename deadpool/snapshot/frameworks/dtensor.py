"""DTensor's caches of sharding decisions, which outlive a build that is thrown away.

A decision holds a mesh, and a mesh knows which rank it was made by; but meshes of different ranks are equal.
So a process that builds as one rank and then as another gets results of operations that carry the first one's
place: wrong offsets in a checkpoint, wrong masks and shards.
"""

from __future__ import annotations

import functools
import sys

import torch


def forget_meshes() -> None:
    """Empty the caches of the calling thread. Imports nothing."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not in every torch
    if clear_native is not None:
        clear_native()
    tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
