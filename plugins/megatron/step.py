"""`wrap_step` for a loop of one's own on megatron-core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

import deadpool.plugins.megatron.adapter  # noqa: F401 registers it
from deadpool.plugins.megatron.microbatches import Microbatches, draw, restore_calculator
from deadpool.plugins.megatron.objects import MegatronObjects
from deadpool.runtime.session import session
from deadpool.runtime.state import StateKeeper
from deadpool.runtime.stepwise import StepRunner

T = TypeVar("T")


def wrap_step(
    train_step: Callable[..., T],
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any = None,
    *,
    data: Any = None,
    num_microbatches: int | None = None,
    **state: Any,
) -> StepRunner[T]:
    """Protect one training step on megatron-core.

    The returned object is called like `train_step`, without the data iterator, which it provides. It is a
    context manager; leaving it waits until all ranks have finished. A call returns None only on a promoted
    spare, for steps that were done before it came. `record(loss=...)` inside the step keeps values per step.

    Args:
        train_step: one iteration: `zero_grad_buffer`, the schedule of `get_forward_backward_func`,
            `optimizer.step`, and the scheduler's step. Called as `train_step(data_iterator, *args)`: an
            iterator over the microbatches of this step, a list of one per model chunk, or None without data.
        model: the DistributedDataParallel module, or a list of them (virtual pipeline stages).
        optimizer: what `get_megatron_optimizer` returned.
        opt_param_scheduler: an OptimizerParamScheduler, any other object with state, or None.
        data: yields microbatches; anything with `state_dict` and `load_state_dict`. None on a rank that reads
            no data.
        num_microbatches: per step; default: megatron's own calculator says it.
        **state: further objects with `state_dict` and `load_state_dict`.

    Raises:
        ConfigError: something cannot be protected; every problem is listed.
    """
    is_own = opt_param_scheduler is None or isinstance(opt_param_scheduler, OptimizerParamScheduler)
    objects = MegatronObjects(model, optimizer, opt_param_scheduler if is_own else None)
    if not is_own:
        state["opt_param_scheduler"] = opt_param_scheduler

    def step(microbatches: Microbatches, *args: Any, **kwargs: Any) -> T:
        restore_calculator(microbatches.calculator)
        objects.complete_parameters()
        return train_step(microbatches.iterators(len(objects.chunks)), *args, **kwargs)

    def draw_step(next_batch: Callable[[], Any]) -> Microbatches:
        return draw(None if data is None else next_batch, num_microbatches)

    keeper = StateKeeper({"megatron": objects, "data": data, **state})
    return StepRunner(step, session(), keeper, data, draw=draw_step)
