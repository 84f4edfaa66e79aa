"""Local checkpointing of nvidia-resiliency-ext 0.7.0 without CUDA.

As shipped it asserts tensor.is_cuda and calls torch.cuda; what is replaced here is only that.
"""

from __future__ import annotations

import glob
import os

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
    dict_list_map_inplace,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy


class CpuStateDict(BasicTensorAwareStateDict):
    def __init__(self, state):
        self.state_dict, self._is_hollow = state, False

    def copy_tensors_to_cpu(self, non_blocking=False):  # .to("cpu") would alias live CPU tensors
        dict_list_map_inplace(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.state_dict)

    def restore_tensor_device(self, non_blocking=True):
        pass


def _send_state_dict(self, state, destination):
    tensors = state.pop_tensors()
    self.send_object(state, destination)
    for tensor in tensors:
        dist.send(tensor, destination, group=self.group)
    state.insert_tensors(tensors)
    return {"data_sent": sum(tensor.nbytes for tensor in tensors)}


def _receive_state_dict(self, source):
    state = self.recv_object(source)
    state.init_tensors()
    for tensor in state.tensors:
        dist.recv(tensor, source, group=self.group)
    return state, {"data_recv": sum(tensor.nbytes for tensor in state.tensors)}


GroupWrapper.isend_state_dict, GroupWrapper.irecv_state_dict = _send_state_dict, _receive_state_dict
torch.cuda.synchronize = lambda *_, **__: None
torch.cuda.current_device = lambda: torch.device("cpu")


class LocalCheckpoints:
    """Saves into this rank's own folder and a replica into the other rank's."""

    def __init__(self, folder: str, *, is_async: bool) -> None:
        replication = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._manager = LocalCheckpointManager(folder, repl_strategy=replication)
        self._queue = AsyncCallsQueue(persistent=False) if is_async else None
        self._folder = folder

    def load(self):
        """(Step, state) of the newest one that all have, or (0, None); newer files are removed."""
        newest = self._manager.find_latest()
        for path in glob.glob(f"{self._folder}/*/*iter_*") + glob.glob(f"{self._folder}/*iter_*"):
            if ".dirty" in path or int(os.path.basename(path).split("_")[1]) > newest:
                os.unlink(path)
        return (newest, self._manager.load()[0].state_dict) if newest > 0 else (0, None)

    def save(self, state, step: int) -> None:
        if self._queue is None:
            self._manager.save(CpuStateDict(state), step, is_async=False)
            return
        self.wait()
        self._queue.schedule_async_request(self._manager.save(CpuStateDict(state), step, is_async=True))

    def wait(self) -> None:
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)
