"""A process group whose peers are this process: one rank of n, with collectives that can be made to fail.

Every collective returns what it would if all ranks held what this one holds. A build or a step
of one rank then runs in one process, and twice the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from deadpool.communicator.echo import echo
from deadpool.errors import CollectiveAborted
from deadpool.plugins.deepspeed.process import forget_process


@dataclass
class Script:
    """What the collectives of all groups do."""

    calls: list[str] = field(default_factory=list)
    fail_at: int = 0  # raise before this call, counted from 1; 0: never

    def restart(self, fail_at: int = 0) -> None:
        self.calls.clear()
        self.fail_at = fail_at

    def count(self, operation: str) -> None:
        self.calls.append(operation)
        if len(self.calls) == self.fail_at:
            raise CollectiveAborted(f"call {self.fail_at}, {operation}, was aborted")


class _Done(dist.Work):
    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


_IN_PLACE = ("allreduce", "broadcast", "reduce")
_ONE_TENSOR = {
    "all_gather_single": "all_gather_base",
    "_allgather_base": "all_gather_base",
    "reduce_scatter_single": "reduce_scatter_base",
    "_reduce_scatter_base": "reduce_scatter_base",
}


class Loopback(dist.ProcessGroup):
    """One group."""

    def __init__(self, rank: int, size: int, script: Script) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this overload
        self._me, self._count, self._script = rank, size, script

    def getBackendName(self) -> str:  # torch's name
        return "loopback"

    def barrier(self, opts: Any = None) -> _Done:
        self._script.count("barrier")
        return _Done([])

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> _Done:
        return self._answer("allgather", [tensor for row in outputs for tensor in row], list(inputs))

    def send(self, tensors: Any, destination: int, tag: int) -> _Done:
        self._script.count("send")
        return _Done(list(tensors))

    def recv(self, tensors: Any, source: int, tag: int) -> _Done:
        self._script.count("recv")  # the buffer stays as it is
        return _Done(list(tensors))

    def _answer(self, operation: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _Done:
        self._script.count(operation)
        echo(operation, outputs, inputs, self._me, self._count)
        return _Done(outputs)


def _in_place(name: str) -> Any:
    def call(self: Loopback, tensors: Any, options: Any = None) -> _Done:
        return self._answer(name, list(tensors), list(tensors))

    return call


def _one_tensor(name: str) -> Any:
    def call(self: Loopback, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> _Done:
        return self._answer(_ONE_TENSOR[name], [output], [given])

    return call


for _name in _IN_PLACE:
    setattr(Loopback, _name, _in_place(_name))
for _name in _ONE_TENSOR:
    setattr(Loopback, _name, _one_tensor(_name))

_script = Script()


def _create(store: Any, rank: int, size: int, timeout: Any) -> Loopback:
    return Loopback(rank, size, _script)


@contextmanager
def world(rank: int, size: int) -> Iterator[Script]:
    """`torch.distributed` as rank `rank` of `size`; leaves nothing of DeepSpeed behind."""
    if "LOOPBACK" not in dist.Backend._plugins:
        dist.Backend.register_backend("loopback", _create, devices=["cpu", "cuda"])
    _script.restart()
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("loopback", store=c10d.HashStore(), rank=rank, world_size=size)
    try:
        yield _script
    finally:
        _script.restart()
        dist.destroy_process_group()
        forget_process()
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before
