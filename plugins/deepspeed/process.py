"""What DeepSpeed keeps once per process, beside its engines."""

from __future__ import annotations

from typing import Any

import deepspeed
import deepspeed.comm.comm as ds_comm
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.utils import groups

_GROUPS = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "mpu",
    "mesh_device",
)


def switch_off_shared_memory() -> None:
    """Keep DeepSpeed's CPU collectives on the process groups.

    Its shared-memory operator goes around them: it would wait for ever for a rank that died. It would also be
    compiled here, which takes half a minute.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forget_process() -> None:
    """Put DeepSpeed back to where it was before the script ran: no groups, no engines, counters at zero.

    ZeRO-3 compares the numbers of modules between ranks; they come from a counter of the process.
    """
    ds_comm.cdb = None
    for name in _GROUPS:
        setattr(groups, name, None)
    groups._ALL_TO_ALL_GROUP.clear()
    p2p._grid = p2p._groups = None
    parameter_offload.FWD_MODULE_STACK.clear()
    partition_parameters.Init.param_id = 0
    module_counter()[0] = 0


def module_counter() -> list[int]:
    """The counter that numbers the modules of ZeRO-3: one list, the default value of an argument."""
    register: Any = parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module
    counter: list[int] = register.__defaults__[0]
    return counter
