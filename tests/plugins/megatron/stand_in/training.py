"""A stand-in with the structure of Megatron-LM's megatron/training/training.py, on real megatron-core.

The wheel of megatron-core does not carry that file. This one has the names that DeadPool relies on, with the
same arguments, and does between two steps what the original does there: timers with barriers, hooks of the
overlapped gather that are taken off and put on again, a rerun state machine, logging and evaluation with
collectives, checkpoints, and a vote on whether to exit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.timers import Timers
from torch.utils.data import DataLoader, Dataset

from examples import megatron_gpt as gpt

_ARGS: argparse.Namespace | None = None
_TIMERS: Timers | None = None


def get_args() -> Any:
    assert _ARGS is not None, "args is not initialized."
    return _ARGS


def get_timers() -> Timers:
    assert _TIMERS is not None, "timers is not initialized."
    return _TIMERS


def set_global_variables(args: argparse.Namespace) -> None:
    global _ARGS, _TIMERS
    assert _ARGS is None, "args is already initialized."
    _ARGS, _TIMERS = args, Timers(log_level=0, log_option="minmax")


def destroy_global_state() -> None:
    global _ARGS, _TIMERS
    _ARGS = _TIMERS = None
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()


def initialize_megatron() -> None:
    args = get_args()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    gpt.initialize(args)
    args.data_parallel_size = parallel_state.get_data_parallel_world_size()
    args.micro_batch_size = gpt.MICRO_BATCH
    args.global_batch_size = gpt.MICRO_BATCH * 4 * args.data_parallel_size
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(
        rank=args.rank,
        rampup_batch_size=[args.global_batch_size // 2, args.global_batch_size // 2, args.rampup_samples],
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
    )
    initialize_rerun_state_machine(mode=RerunMode(args.rerun_mode))


def pretrain(train_valid_test_dataset_provider: Any, forward_step_func: Callable[..., Any]) -> None:
    initialize_megatron()
    args, timers = get_args(), get_timers()
    timers("setup", log_level=0).start(barrier=True)
    config = gpt.build_config(args)
    model = gpt.build_model(config, args)
    optimizer, opt_param_scheduler = gpt.build_optimizer(model, args)
    timers("setup").stop()
    if args.vpp > 1:
        built = [
            build_train_valid_test_data_iterators(partial(train_valid_test_dataset_provider, vp_stage=stage))
            for stage in range(len(model))
        ]
        train_data_iterator: Any = [each[0] for each in built]
        valid_data_iterator: Any = [each[1] for each in built]
    else:
        train_data_iterator, valid_data_iterator, _ = build_train_valid_test_data_iterators(
            train_valid_test_dataset_provider
        )
    iteration, flops = train(
        forward_step_func,
        model,
        optimizer,
        opt_param_scheduler,
        train_data_iterator,
        valid_data_iterator,
        None,
        config,
        {},
        None,
    )
    assert iteration == args.train_iters, iteration
    assert flops == 10.0 * iteration, flops  # counted in every iteration, whoever ran it
    evaluate_and_print_results("the end", forward_step_func, valid_data_iterator, model, iteration, config)


# ---- data ------------------------------------------------------------------------------------------------


def build_pretraining_data_loader(dataset: Dataset[Any], consumed_samples: int) -> DataLoader[Any]:
    args = get_args()
    return DataLoader(
        dataset,
        batch_sampler=PretrainingSampler(
            consumed_samples,
            args.micro_batch_size,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        ),
    )


class PretrainingSampler:
    """Samples in order, dealt out to the data-parallel ranks, beginning after those consumed."""

    def __init__(self, consumed: int, micro_batch: int, replica: int, replicas: int) -> None:
        self.consumed, self.micro_batch, self.replica, self.replicas = (
            consumed,
            micro_batch,
            replica,
            replicas,
        )

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed + self.replica * self.micro_batch
        while True:
            yield list(range(first, first + self.micro_batch))
            first += self.micro_batch * self.replicas


def build_train_valid_test_datasets(provider: Callable[..., Any], sizes: Any = None) -> Any:
    args = get_args()
    return provider(sizes or (args.train_iters * args.global_batch_size, 64, 64))


def build_train_valid_test_data_loaders(provider: Callable[..., Any]) -> Any:
    args = get_args()
    loaders: list[Any] = [None, None, None]
    if parallel_state.get_tensor_model_parallel_rank() == 0 or getattr(provider, "is_distributed", True):
        train, valid, test = build_train_valid_test_datasets(provider)
        loaders = [
            build_pretraining_data_loader(train, args.consumed_train_samples),
            build_pretraining_data_loader(valid, args.consumed_valid_samples),
            build_pretraining_data_loader(test, 0),
        ]
    flags = torch.tensor([int(loader is not None) for loader in loaders], device="cuda")
    dist.broadcast(flags, 0)
    args.do_train, args.do_valid, args.do_test = (bool(flag) for flag in flags.tolist())
    return loaders


def build_train_valid_test_data_iterators(provider: Callable[..., Any]) -> Any:
    loaders = build_train_valid_test_data_loaders(provider)
    return tuple(None if loader is None else RerunDataIterator(iter(loader)) for loader in loaders)


# ---- the loop --------------------------------------------------------------------------------------------


def should_disable_forward_pre_hook(args: Any) -> bool:
    return bool(args.overlap and args.optimizer == "distributed")


def enable_forward_pre_hook(model: Any) -> None:
    for chunk in model:
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model: Any, param_sync: bool = True) -> None:
    for chunk in model:
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Any,
    config: Any,
    checkpointing_context: Any,
    non_loss_data_func: Any,
) -> tuple[int, float]:
    args, timers = get_args(), get_timers()
    for chunk in model:
        chunk.train()
    iteration = args.iteration
    machine = get_rerun_state_machine()
    machine.current_iteration = iteration
    flops = args.num_floating_point_operations_so_far
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap:
        assert config.no_sync_func is None, "no_sync_func must be None"
        config.no_sync_func = [chunk.no_sync for chunk in model]
        if len(model) == 1:
            config.no_sync_func = config.no_sync_func[0]
    config.finalize_model_grads_func = finalize_model_grads
    timers("interval-time", log_level=0).start(barrier=True)
    dist.barrier()
    num_microbatches = get_num_microbatches()
    forward_backward_func = get_forward_backward_func()
    start_iteration = iteration
    pre_hook_enabled = False
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model, param_sync=False)
    should_exit = False
    total_losses: dict[str, torch.Tensor] = {}

    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        if get_num_microbatches() != num_microbatches and iteration != 0:
            assert get_num_microbatches() > num_microbatches, "microbatches should not decrease"
        num_microbatches = get_num_microbatches()
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        args.curr_iteration = iteration
        loss_dict, skipped, _, should_exit, exit_code, grad_norm, _, _ = train_step(
            forward_step_func,
            train_data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            forward_backward_func,
            iteration=iteration,
        )
        if should_exit:
            break
        if iteration == start_iteration:
            if skipped:
                start_iteration = iteration + 1
            elif should_disable_forward_pre_hook(args):
                enable_forward_pre_hook(model)
                pre_hook_enabled = True
        iteration += 1
        args.consumed_train_samples += (
            args.data_parallel_size * args.micro_batch_size * get_num_microbatches()
        )
        flops += 10.0
        training_log(loss_dict, total_losses, iteration, grad_norm)
        if iteration % args.eval_interval == 0:
            timers("interval-time").stop()
            if should_disable_forward_pre_hook(args):
                disable_forward_pre_hook(model)
                pre_hook_enabled = False
            timers("eval-time", log_level=0).start(barrier=True)
            prefix = f"iteration {iteration}"
            evaluate_and_print_results(
                prefix, forward_step_func, valid_data_iterator, model, iteration, config
            )
            timers("eval-time").stop()
            if should_disable_forward_pre_hook(args):
                enable_forward_pre_hook(model)
                pre_hook_enabled = True
            timers("interval-time", log_level=0).start(barrier=True)
        should_exit = checkpoint_and_decide_exit(
            model,
            optimizer,
            opt_param_scheduler,
            iteration,
            flops,
            checkpointing_context,
            train_data_iterator,
        )
        if should_exit:
            exit_code = 0
            break

    if pre_hook_enabled:
        disable_forward_pre_hook(model)
    if should_exit:
        dist.barrier()
        sys.exit(exit_code)
    return iteration, flops


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
    forward_backward_func: Any,
    iteration: int | None = None,
) -> Any:
    machine = get_rerun_state_machine()
    losses: Any = []
    while machine.should_run_forward_backward(data_iterator):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model if len(model) > 1 else model[0],
            num_microbatches=get_num_microbatches(),
            seq_length=gpt.CONTEXT,
            micro_batch_size=gpt.MICRO_BATCH,
            forward_only=False,
        )
    should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
    if should_exit:
        return {}, True, should_checkpoint, should_exit, exit_code, None, None, 0
    update_successful, grad_norm, zeros = optimizer.step()
    agreed = torch.tensor([int(update_successful)], device="cuda")
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=parallel_state.get_model_parallel_group())
    if agreed.item():
        opt_param_scheduler.step(increment=1)
    loss = {}
    if losses:
        loss = {"lm loss": torch.stack([each["loss"] for each in losses]).mean()}
        dist.all_reduce(loss["lm loss"], group=parallel_state.get_data_parallel_group())
    return loss, not agreed.item(), should_checkpoint, should_exit, exit_code, grad_norm, zeros, 0


def training_log(loss_dict: Any, total_losses: dict[str, torch.Tensor], iteration: int, norm: Any) -> None:
    args, timers = get_args(), get_timers()
    for name, value in loss_dict.items():
        total_losses[name] = total_losses.get(name, torch.zeros(())) + value
    if iteration % args.log_interval == 0:
        elapsed = timers("interval-time").elapsed(barrier=True)
        if loss_dict:
            print(
                f"iteration {iteration}: {elapsed:.1f} s, loss {loss_dict['lm loss'].item():.3f}", flush=True
            )
        total_losses.clear()


def evaluate_and_print_results(
    prefix: str, forward_step_func: Any, data_iterator: Any, model: Any, iteration: int, config: Any
) -> None:
    args = get_args()
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        losses = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model if len(model) > 1 else model[0],
            num_microbatches=2,
            seq_length=gpt.CONTEXT,
            micro_batch_size=gpt.MICRO_BATCH,
            forward_only=True,
        )
    args.consumed_valid_samples += args.data_parallel_size * args.micro_batch_size * 2
    for chunk in model:
        chunk.train()
    if losses:
        loss = torch.stack([each["loss"] for each in losses]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        if (
            parallel_state.get_data_parallel_rank() == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            print(f"validation at {prefix}: {float(loss).hex()}", flush=True)


def save_checkpoint(iteration: int, flops: float, opt_param_scheduler: Any) -> None:
    args = get_args()
    dist.barrier()
    if args.rank == 0 and args.save:
        state = {
            "iteration": iteration,
            "consumed_train_samples": args.consumed_train_samples,
            "consumed_valid_samples": args.consumed_valid_samples,
            "flops": flops,
            "scheduler": opt_param_scheduler.num_steps,
        }
        Path(args.save).mkdir(parents=True, exist_ok=True)
        (Path(args.save) / f"iter_{iteration:07d}.json").write_text(json.dumps(state))
    dist.barrier()


def checkpoint_and_decide_exit(
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    iteration: int,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any,
    train_data_iterator: Any,
) -> bool:
    args = get_args()
    if iteration % args.save_interval == 0:
        save_checkpoint(iteration, num_floating_point_operations_so_far, opt_param_scheduler)
    if args.exit_interval and iteration % args.exit_interval == 0:
        votes = torch.ones(1, dtype=torch.int, device="cuda")
        dist.all_reduce(votes)
        return int(votes) == int(args.world_size)
    return False
