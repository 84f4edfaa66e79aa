"""The objects of one rank's Megatron training, and the parts of them that the adaptor works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random

from deadpool.plugins.megatron.versions import Internals, installed_internals
from deadpool.snapshot.adapter import register_forgetter


class MegatronObjects:
    """Model chunks, optimizer and scheduler: one object of the training state.

    Args:
        model: one DDP module, or one per virtual pipeline stage.
        optimizer: what `get_megatron_optimizer` returned.
        scheduler: an OptimizerParamScheduler, or None.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any = None) -> None:
        self.chunks: tuple[Any, ...] = tuple(model) if isinstance(model, list | tuple) else (model,)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.internals: Internals = installed_internals()
        self.needs_gather = False  # restored: parameters of other shards are not there yet
        _optimizers.update(self.parts)

    @property
    def parts(self) -> list[Any]:
        """The optimizers behind the given one that have parameters."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]

    def bucket_groups(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from chunk.bucket_groups
            yield from chunk.expert_parallel_bucket_groups

    def complete_parameters(self) -> None:
        """Gather the parameters of all shards, if a restore left that to do.

        A restore asks no peer, so it casts this rank's own shard only; what the other shards hold is stale,
        or torn by a gather that was aborted in a forward. Called by every rank as the next step begins.
        """
        if not self.needs_gather:
            return
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)
        self.needs_gather = False


_optimizers: WeakSet[Any] = WeakSet()
"""Of builds that may be thrown away: see `forget_build`."""


def is_ddp(chunk: object) -> bool:
    """Whether a model chunk is megatron-core's own DistributedDataParallel."""
    return type(chunk) is DistributedDataParallel


def is_sharded(part: object) -> bool:
    """Whether an optimizer keeps a shard per data-parallel rank."""
    return isinstance(part, DistributedOptimizer)


def inner_params(part: Any) -> list[torch.Tensor]:
    """What the inner optimizer steps, in the order of its groups: 32-bit masters."""
    return [param for group in part.optimizer.param_groups for param in group["params"]]


def replica_ranks(chunks: Sequence[Any]) -> tuple[int, ...]:
    """Global ranks that hold the same parameters as this one."""
    return tuple(torch.distributed.get_process_group_ranks(chunks[0].dp_cp_group))


def forget_build() -> None:
    """Undo what a throw-away build leaves in megatron's globals, so that the script can build again.

    Also lets go of the optimizers' shards. With 32-bit parameters a shard is a view with a history, the
    history holds the model through the hooks of its gradients, and the model's configuration holds the
    optimizer: a ring through C++ that the collector does not see.
    """
    for optimizer in list(_optimizers):
        vars(optimizer).clear()
    _optimizers.clear()
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, torch.distributed.ProcessGroup):  # destroy_model_parallel leaves some
            setattr(parallel_state, name, None)
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    random.initialize_rng_tracker(force_reset=True)


register_forgetter(forget_build)
