"""Inner communicators: what a handle forwards to under one generation. Small factories, nothing else.

`make_nccl` is written to NCCL's rules and has not run on several GPUs yet; this module imports on a CPU
build of torch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from deadpool.communicator.nccl_environment import nccl_environment_problems
from deadpool.errors import IntegrationError


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
    """Make an NCCL communicator that can be aborted; `connect_nccl` connects it.

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


def connect_nccl(communicator: c10d.Backend) -> int:
    """Connect on the current device, so that an abort has something to revoke. A collective act of its ranks.

    Returns:
        Address of the ncclComm_t, or 0 where torch does not tell it.
    """
    communicator.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    address = getattr(communicator, "_comm_ptr", None)
    return int(address()) if address is not None else 0
