"""What this adaptor cannot protect, refused by name before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from deadpool.plugins.megatron.arena import MOMENTS
from deadpool.plugins.megatron.objects import MegatronObjects, is_ddp

_OPTIMIZERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)

# What is asked of the model's configuration -> why it is refused.
_MODEL_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda config: bool(config.num_moe_experts),
        "mixture of experts (num_moe_experts) is not supported yet",
    ),
    (
        lambda config: config.context_parallel_size > 1,
        "context parallelism (context_parallel_size) is not supported yet",
    ),
    (
        lambda config: bool(config.fp8),
        "FP8 (fp8) is not supported: its scaling history is no part of a snapshot",
    ),
    (lambda config: bool(getattr(config, "fp4", None)), "FP4 (fp4) is not supported"),
    (
        lambda config: (
            getattr(config, "enable_cuda_graph", False)
            or getattr(config, "external_cuda_graph", False)
            or getattr(config, "cuda_graph_impl", "none") != "none"
        ),
        "CUDA graphs (cuda_graph_impl) are not supported: a captured graph holds aborted communicators",
    ),
    (
        lambda config: getattr(config, "tp_comm_overlap", False),
        "userbuffers (tp_comm_overlap) are not supported: they map the memory of ranks that may die",
    ),
    (
        lambda config: getattr(config, "symmetric_ar_type", None) is not None,
        "symmetric memory (symmetric_ar_type) is not supported: it maps the memory of ranks that may die",
    ),
    (
        lambda config: getattr(config, "qk_clip", False),
        "QK clipping (qk_clip) is not supported: it scales masters and parameters each for itself",
    ),
    (
        lambda config: getattr(config, "defer_embedding_wgrad_compute", False),
        "deferred embedding gradients (defer_embedding_wgrad_compute) are not supported",
    ),
    (
        lambda config: config.sequence_parallel and not _has_transformer_engine(),
        "sequence parallelism (sequence_parallel) needs Transformer Engine, which is not installed",
    ),
)

_DDP_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda config: config.num_distributed_optimizer_instances > 1,
        "several distributed optimizers (num_distributed_optimizer_instances) are not supported",
    ),
    (
        lambda config: config.nccl_ub,
        "registered communication buffers (nccl_ub) are not supported: they belong to one communicator",
    ),
)

_OPTIMIZER_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda config: config.use_precision_aware_optimizer,
        "the precision-aware optimizer (use_precision_aware_optimizer) is not supported",
    ),
    (
        lambda config: config.optimizer_cpu_offload,
        "optimizer offload to the CPU (optimizer_cpu_offload) is not supported",
    ),
    (
        lambda config: config.optimizer != "adam",
        "only Adam is supported (optimizer): what the first step of another one creates is unknown",
    ),
)


def find_problems(objects: MegatronObjects) -> list[str]:
    """Why these objects cannot be protected; empty when they can."""
    problems: list[str] = []
    for index, chunk in enumerate(objects.chunks):
        if type(chunk).__name__ in ("FullyShardedDataParallel", "TorchFullyShardedDataParallel"):
            problems.append("Megatron-FSDP is not supported; use DistributedDataParallel of megatron-core")
        elif not is_ddp(chunk):
            problems.append(
                f"model chunk {index} is a {type(chunk).__name__}; wrap it in megatron.core.distributed."
                "DistributedDataParallel"
            )
        else:
            problems += _ask(_MODEL_REFUSALS, chunk.config) + _ask(_DDP_REFUSALS, chunk.ddp_config)
            if chunk.ddp_config.use_megatron_fsdp:
                problems.append("Megatron-FSDP (use_megatron_fsdp) is not supported")
    if not problems:
        problems += _find_optimizer_problems(objects)
    scheduler = objects.scheduler
    if scheduler is not None and not isinstance(scheduler, OptimizerParamScheduler):
        problems.append(f"the scheduler is a {type(scheduler).__name__}; pass it as an object of its own")
    return list(dict.fromkeys(problems))  # once, however many chunks share it


def _find_optimizer_problems(objects: MegatronObjects) -> list[str]:
    problems: list[str] = []
    for part in objects.parts:
        if type(part) not in _OPTIMIZERS:
            known = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
            problems.append(f"optimizer {type(part).__name__} is not supported; DeadPool knows {known}")
            continue
        problems += _ask(_OPTIMIZER_REFUSALS, part.config) or _find_state_problems(part)
    return problems


def _find_state_problems(part: Any) -> list[str]:
    """Whether the inner optimizer keeps exactly what one buffer of masters and moments can hold."""
    inner = part.optimizer
    name = f"{type(inner).__module__}.{type(inner).__name__}"
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and type(inner).__name__ != "FusedAdam":
        return [f"the inner optimizer {name} is not supported; use Adam"]
    problems = []
    if any(group.get("amsgrad") for group in inner.param_groups):
        problems.append(f"{name} with amsgrad is not supported")
    params = [param for group in inner.param_groups for param in group["params"]]
    if any(param.dtype is not torch.float32 for param in params):
        problems.append("masters that are not float32 are not supported")
    unknown = {key for param in params for key in inner.state.get(param, ())} - {"step", *MOMENTS}
    if unknown:
        problems.append(f"{name} keeps {', '.join(sorted(unknown))}, which is not supported")
    return problems


def _ask(refusals: tuple[tuple[Callable[[Any], bool], str], ...], config: Any) -> list[str]:
    return [reason for is_refused, reason in refusals if is_refused(config)]


def _has_transformer_engine() -> bool:
    from megatron.core.tensor_parallel.random import HAVE_TE

    return bool(HAVE_TE)
