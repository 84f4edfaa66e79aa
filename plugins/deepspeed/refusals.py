"""What would come back inexact, found by name before training starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

Check = Callable[[Any], bool]


def find_problems(name: str, engine: Any) -> list[str]:
    """Every feature of the engine that is not covered, with the remedy.

    Args:
        name: of the engine in `wrap`.
        engine: of DeepSpeed.
    """
    if type(engine) not in (DeepSpeedEngine, PipelineEngine):
        return [
            f"{name}: a {type(engine).__qualname__} is not covered; DeepSpeedEngine and PipelineEngine are"
        ]
    return [f"{name}: {what}" for what, is_used in _CHECKS if is_used(engine)]


def _zero(field: str) -> Check:
    return lambda engine: bool(getattr(engine._config.zero_config, field))


def _is_offloaded(field: str, *devices: str) -> Check:
    def is_used(engine: Any) -> bool:
        offload = getattr(engine._config.zero_config, field)
        return offload is not None and str(getattr(offload.device, "value", offload.device)) in devices

    return is_used


def _is_cpu_optimizer(engine: Any) -> bool:
    kinds = ["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "ZenFlowCPUAdam"]
    if get_accelerator().device_name() == "cpu":
        kinds.append("FusedAdam")  # the same C++ under another name
    return any(kind.__name__ in kinds for kind in type(engine.basic_optimizer).__mro__)


def _has_other_model_parallelism(engine: Any) -> bool:
    return not isinstance(engine, PipelineEngine) and int(engine.mp_world_size) > 1


def _has_scaler(engine: Any) -> bool:
    scalers = (
        engine.torch_autocast_z0_gradscaler,
        getattr(engine.optimizer, "torch_autocast_gradscaler", None),
    )
    return any(scaler is not None for scaler in scalers)


_CHECKS: tuple[tuple[str, Check], ...] = (
    (
        "DeepSpeed's CPU optimizers keep running products of beta in C++, where they cannot be set back "
        'exactly; use an optimizer of torch.optim ("torch_adam": true)',
        _is_cpu_optimizer,
    ),
    (
        "offload to NVMe is not covered: snapshots hold tensors in memory; remove it",
        lambda engine: (
            _is_offloaded("offload_optimizer", "nvme")(engine)
            or _is_offloaded("offload_param", "nvme")(engine)
        ),
    ),
    (
        "offload to the CPU is not covered; remove offload_optimizer and offload_param",
        lambda engine: (
            _is_offloaded("offload_optimizer", "cpu")(engine) or _is_offloaded("offload_param", "cpu")(engine)
        ),
    ),
    (
        "mixture-of-experts layers are not covered: experts are sharded over groups of their own",
        lambda engine: bool(engine.has_moe_layers),
    ),
    (
        "curriculum learning and data sampling of DeepSpeed are not covered: their position cannot be set "
        "back; remove data_efficiency.data_sampling",
        lambda engine: (
            bool(engine.data_efficiency_enabled() and engine.data_sampling_enabled())
            or bool(engine.curriculum_learning_enabled())
        ),
    ),
    (
        "random-LTD is not covered: its schedule cannot be set back; remove "
        "data_efficiency.data_routing.random_ltd",
        lambda engine: bool(engine.random_ltd_enabled()),
    ),
    (
        "hpZ is not covered: it keeps a second partition of the parameters; set zero_hpz_partition_size to 1",
        lambda engine: int(engine.zero_hpz_partition_size()) > 1,
    ),
    (
        "quantisation of ZeRO++ is not covered; remove zero_quantized_weights, zero_quantized_gradients and "
        "zero_quantized_nontrainable_weights",
        lambda engine: bool(
            engine.zero_quantized_weights()
            or engine.zero_quantized_gradients()
            or engine.zero_quantized_nontrainable_weights()
        ),
    ),
    ("ZenFlow is not covered; remove zero_optimization.zenflow", lambda engine: bool(engine.zenflow)),
    (
        "DeepCompile is not covered; remove compile.deepcompile",
        lambda engine: bool(engine.is_deepcompile_enabled()),
    ),
    (
        "tensor and sequence parallelism are not covered; only data and pipeline parallelism are",
        lambda engine: (
            int(engine.autotp_size()) > 1
            or int(engine.sequence_parallel_size) > 1
            or _has_other_model_parallelism(engine)
        ),
    ),
    (
        "the gradient scaler of torch autocast with fp16 is not covered; use bf16",
        _has_scaler,
    ),
    (
        "training_data makes a loader that cannot say which batch comes next; leave it out of initialize, "
        "and give wrap a loader with a position (data=...)",
        lambda engine: engine.training_dataloader is not None,
    ),
    (
        "an iterator was given to the engine before wrap and cannot be wound back; call "
        "train_batch(data_iter=...) with an iterator that train makes",
        lambda engine: getattr(engine, "data_iterator", None) is not None,
    ),
    ("an engine without an optimizer has nothing to protect", lambda engine: engine.basic_optimizer is None),
)
