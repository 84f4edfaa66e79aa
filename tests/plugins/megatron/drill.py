"""Training of the example on one rank, with snapshots but without agents, and aborts at chosen places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d

from deadpool.snapshot.codec import tensor_bytes
from deadpool.snapshot.stateful import TrainingState, collect
from tests.unit.snapshot.support import Aborted

Values = dict[str, float]


class Drill:
    """One rank of examples/megatron_gpt.py.

    Args:
        example: that module.
        options: of its command line.
    """

    def __init__(self, example: Any, options: Sequence[str]) -> None:
        from deadpool.plugins.megatron.objects import MegatronObjects

        arguments = example.parse_arguments(options)
        example.initialize(arguments)
        self.trainer = example.Trainer(arguments)
        self.data = example.Windows(0, 1)
        self.objects = MegatronObjects(self.trainer.chunks, self.trainer.optimizer, self.trainer.scheduler)
        self.zeroes_last = False  # as some loops do
        self._batches = iter(self.data)
        self.microbatches = example.MICRO_BATCHES

    def collect(self) -> TrainingState:
        import deadpool.plugins.megatron.adapter  # noqa: F401 registers it

        return collect({"megatron": self.objects, "data": self.data})

    def step(self) -> Values:
        self.objects.complete_parameters()
        batches = iter([next(self._batches) for _ in range(self.microbatches)])
        if not self.zeroes_last:
            values: Values = self.trainer.step(batches)
            return values
        chunk = self.trainer.chunks[0]
        with patch.object(chunk, "zero_grad_buffer", lambda: None):
            values = self.trainer.step(batches)
        chunk.zero_grad_buffer()
        return values

    def steps(self, count: int) -> list[Values]:
        return [self.step() for _ in range(count)]

    def parameters(self) -> list[bytes]:
        return [tensor_bytes(param) for chunk in self.trainer.chunks for param in chunk.parameters()]

    def main_grads(self) -> list[torch.Tensor]:
        return [param.main_grad for chunk in self.trainer.chunks for param in chunk.parameters()]


MakeDrill = Callable[..., Drill]


def abort(*_: Any, **__: Any) -> Any:
    raise Aborted("the generation was closed")


@contextmanager
def aborting_at(place: str, drill: Drill) -> Iterator[None]:
    """The next iteration raises at `place`, once."""
    chunk = drill.trainer.chunks[0]
    groups = chunk.bucket_groups
    if place in ("forward", "middle of the forward"):
        with_params = (module for module in chunk.module.modules() if list(module.parameters(recurse=False)))
        module = chunk.module if place == "forward" else next(with_params)
        handle = module.register_forward_hook(abort)
        yield
        handle.remove()
        return
    if place == "last backward":
        calls = iter(range(drill.microbatches))
        params = list(chunk.parameters())
        param = params[len(params) // 2]
        handle = param.register_hook(lambda grad: abort() if next(calls) + 1 == drill.microbatches else grad)
        yield
        handle.remove()
        return
    if place == "batch of collectives":  # as a batch of sends and receives that finds its group closed
        distributed_c10d._world.pg_coalesce_state[drill.objects.parts[0].get_grad_stats_parallel_group()] = []
        with patch.object(drill.objects.parts[0], "get_grad_norm", abort):
            yield
        return
    target: tuple[Any, str]
    match place:
        case "reduce-scatter":  # the second group's, while the first one's is in flight if it overlaps
            target = (groups[-1], "start_grad_sync")
        case "gradient norm":
            target = (drill.objects.parts[0], "get_grad_norm")
        case "gather in the optimizer step":
            target = (groups[-1], "start_param_sync")
        case "gather in the forward":
            target = (groups[0], "start_param_sync")
        case _:
            raise ValueError(place)
    with patch.object(*target, abort):
        yield


@contextmanager
def collectives() -> Iterator[list[tuple[str, bool]]]:
    """The collectives that megatron calls meanwhile, each with whether a backward called it."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    found: list[tuple[str, bool]] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append((name, torch._C._current_graph_task_id() >= 0))
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in (
            (buffers, "dist_all_gather_func"),
            (buffers, "dist_reduce_scatter_func"),
            (torch.distributed, "all_reduce"),
        ):
            stack.enter_context(patch.object(owner, name, noting(name, getattr(owner, name))))
        yield found


def build_alone(*options: str) -> Drill:
    """In a process of its own, whose default group exists already."""
    from deadpool.testing import megatron_cpu

    megatron_cpu.install()
    return Drill(import_module("examples.megatron_gpt"), options)


def outcome(drill: Drill) -> Any:
    """What two iterations do, or the error that they end with."""
    try:
        with collectives() as called:
            values = drill.steps(2)
    except (AssertionError, RuntimeError, ValueError) as error:
        return repr(error)
    swallowed = len(distributed_c10d._world.pg_coalesce_state)
    return values, drill.parameters(), called, swallowed
