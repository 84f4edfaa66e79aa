"""Training of the example on one rank, with snapshots but without agents, and aborts at chosen places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

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
        self._batches = iter(self.data)
        self._count = example.MICRO_BATCHES

    def collect(self) -> TrainingState:
        import deadpool.plugins.megatron.adapter  # noqa: F401 registers it

        return collect({"megatron": self.objects, "data": self.data})

    def step(self) -> Values:
        self.objects.complete_parameters()
        values: Values = self.trainer.step(iter([next(self._batches) for _ in range(self._count)]))
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
    if place == "forward":
        handle = chunk.module.register_forward_hook(abort)
        yield
        handle.remove()
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
