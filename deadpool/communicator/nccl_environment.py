"""Environment of an NCCL worker: nobody but DeadPool may abort. Loads no torch: the agent sets it."""

from __future__ import annotations

import os
from collections.abc import Mapping

NCCL_ENVIRONMENT: Mapping[str, str] = {
    # torch's watchdog would end the process or abort communicators one by one.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Multicast objects of an aborted communicator are not always released.
    "NCCL_NVLS_ENABLE": "0",
}
"""What an agent sets in a worker's environment, unless the user has set it: then it is checked."""


def nccl_environment_problems(environment: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each variable that would let somebody else abort; empty when all is well."""
    actual = os.environ if environment is None else environment
    return [
        f"{name} is {actual.get(name, 'not set')!r} and must be {wanted!r}"
        for name, wanted in NCCL_ENVIRONMENT.items()
        if actual.get(name) != wanted
    ]
