"""Inner communicators: what a handle forwards to under one generation. Small factories, nothing else.

`make_nccl` is written to NCCL's rules and has not run on several GPUs yet; this module imports on a CPU
build of torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from deadpool.errors import IntegrationError

NCCL_ENVIRONMENT: Mapping[str, str] = {
    # Nobody but DeadPool may abort: torch's watchdog would end the process or abort communicators one by one.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Multicast objects of an aborted communicator are not always released (issues named in docs/limits.md).
    "NCCL_NVLS_ENABLE": "0",
}
"""What the launcher sets in a worker's environment before torch is imported."""


def nccl_environment_problems(environment: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each variable that would let somebody else abort; empty when all is well."""
    actual = os.environ if environment is None else environment
    return [
        f"{name} is {actual.get(name, 'not set')!r} and must be {wanted!r}"
        for name, wanted in NCCL_ENVIRONMENT.items()
        if actual.get(name) != wanted
    ]


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> c10d.Backend:
    """Connect a gloo communicator; blocks until all peers have connected.

    Args:
        store: a prefix never used before.
        rank: rank within the group.
        size: size of the group.
        timeout: of each peer's connection, and of collectives until somebody sets another.
    """
    communicator: c10d.Backend = c10d.ProcessGroupGloo(store, rank, size, timeout)
    communicator._set_sequence_number_for_group()
    return communicator


def make_nccl(store: Store, rank: int, size: int, options: Any) -> c10d.Backend:
    """Make an NCCL communicator that can be aborted; it connects at first use.

    Args:
        store: a prefix never used before.
        rank: rank within the group.
        size: size of the group.
        options: the `ProcessGroupNCCL.Options` that the framework asked with.

    Raises:
        IntegrationError: torch has no NCCL, or the environment would let somebody else abort.
    """
    if not dist.is_nccl_available():
        raise IntegrationError("this torch has no NCCL; ask for the backend 'gloo'")
    problems = nccl_environment_problems()
    if problems:
        raise IntegrationError("the environment of an NCCL worker is wrong: " + "; ".join(problems))
    # A blocking communicator that waits for a dead peer cannot be aborted.
    options.config.blocking = 0
    # A split needs its parent, which may be aborted by then: every generation starts from the store.
    options.split_from = None
    communicator: c10d.Backend = c10d.ProcessGroupNCCL(store, rank, size, options)
    communicator._set_sequence_number_for_group()
    return communicator
