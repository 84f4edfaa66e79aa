"""What cannot be protected is refused by name, with every problem, before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deadpool.errors import ConfigError, IntegrationError, LayoutMismatch
from deadpool.snapshot.stateful import collect
from tests.plugins.megatron.drill import Drill

Change = Callable[[Drill, pytest.MonkeyPatch], None]


def set_model(name: str, value: Any) -> Change:
    return lambda drill, patch: patch.setattr(drill.trainer.chunks[0].config, name, value)


def set_ddp(name: str, value: Any) -> Change:
    return lambda drill, patch: patch.setattr(drill.trainer.chunks[0].ddp_config, name, value)


def set_optimizer(name: str, value: Any) -> Change:
    return lambda drill, patch: patch.setattr(drill.objects.parts[0].config, name, value)


def use_amsgrad(drill: Drill, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(drill.objects.parts[0].optimizer.param_groups[0], "amsgrad", True)


def use_another_inner_optimizer(drill: Drill, patch: pytest.MonkeyPatch) -> None:
    part = drill.objects.parts[0]
    patch.setattr(part, "optimizer", torch.optim.SGD(part.optimizer.param_groups, lr=0.1))


def keep_more_state(drill: Drill, patch: pytest.MonkeyPatch) -> None:
    inner = drill.objects.parts[0].optimizer
    patch.setitem(inner.state[inner.param_groups[0]["params"][0]], "trace", torch.zeros(1))


def leave_ddp_out(drill: Drill, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drill.objects, "chunks", (drill.trainer.chunks[0].module,))


def use_megatron_fsdp(drill: Drill, patch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    fsdp = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(fsdp)
    patch.setattr(drill.objects, "chunks", (fsdp,))


def use_another_scheduler(drill: Drill, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drill.objects, "scheduler", object())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_model("num_moe_experts", 8), "mixture of experts"),
        (set_model("context_parallel_size", 2), "context parallelism"),
        (set_model("fp8", "hybrid"), "FP8"),
        (set_model("fp4", "e2m1"), "FP4"),
        (set_model("cuda_graph_impl", "local"), "CUDA graphs"),
        (set_model("enable_cuda_graph", True), "CUDA graphs"),
        (set_model("external_cuda_graph", True), "CUDA graphs"),
        (set_model("sequence_parallel", True), "sequence parallelism .* needs Transformer Engine"),
        (set_ddp("use_megatron_fsdp", True), "Megatron-FSDP"),
        (set_ddp("num_distributed_optimizer_instances", 2), "several distributed optimizers"),
        (set_ddp("nccl_ub", True), "registered communication buffers"),
        (set_model("tp_comm_overlap", True), "tp_comm_overlap"),
        (set_model("symmetric_ar_type", "two_shot"), "symmetric_ar_type"),
        (set_model("qk_clip", True), "qk_clip"),
        (set_model("defer_embedding_wgrad_compute", True), "defer_embedding_wgrad_compute"),
        (set_optimizer("use_precision_aware_optimizer", True), "precision-aware"),
        (set_optimizer("optimizer_cpu_offload", True), "offload"),
        (set_optimizer("optimizer", "sgd"), "only Adam"),
        (use_amsgrad, "amsgrad"),
        (use_another_inner_optimizer, "SGD is not supported"),
        (keep_more_state, "keeps trace"),
        (leave_ddp_out, "model chunk 0 is a Float16Module"),
        (use_megatron_fsdp, "Megatron-FSDP is not supported"),
        (use_another_scheduler, "the scheduler is a object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    shared_drill: Drill, monkeypatch: pytest.MonkeyPatch, change: Change, words: str
) -> None:
    change(shared_drill, monkeypatch)
    with pytest.raises(ConfigError, match=f"^megatron: .*{words}"):
        shared_drill.collect()


def test_every_problem_is_listed(shared_drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (set_model("fp8", "hybrid"), set_model("num_moe_experts", 4), use_another_scheduler):
        change(shared_drill, monkeypatch)
    with pytest.raises(ConfigError) as refusal:
        shared_drill.collect()
    assert len(refusal.value.problems) == 3


@pytest.mark.parametrize("which", ["module", "optimizer"])
def test_megatron_objects_given_to_the_plain_wrap_are_refused(shared_drill: Drill, which: str) -> None:
    objects = {"module": shared_drill.trainer.chunks, "optimizer": shared_drill.trainer.optimizer}
    with pytest.raises(ConfigError, match=r"megatron\.wrap_step"):
        collect({which: objects[which]})


def test_a_boundary_is_not_captured_once_a_checkpoint_has_moved_the_masters(
    shared_drill: Drill, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, adapter) = shared_drill.collect().adapters[0]
    assert adapter.why_not_now(has_stepped=True) is None
    param = shared_drill.objects.parts[0].optimizer.param_groups[0]["params"][1]
    monkeypatch.setattr(param, "data", param.data.clone())
    with pytest.raises(LayoutMismatch, match="master of parameter 1 was moved"):
        adapter.why_not_now(has_stepped=True)


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.0", "unknown"])
def test_another_version_is_refused_by_name_with_the_range(version: str) -> None:
    from deadpool.plugins.megatron.versions import internals_for

    with pytest.raises(IntegrationError, match=rf"megatron-core {version} .* 0\.16 to 0\.19"):
        internals_for(version)


@pytest.mark.parametrize(
    ("version", "flags"), [("0.16.1", 0), ("0.17.0", 1), ("0.18.2", 1), ("0.19.2", 1), ("0.19.0rc1", 1)]
)
def test_each_range_of_versions_has_its_internals(version: str, flags: int) -> None:
    from deadpool.plugins.megatron.versions import internals_for

    assert len(internals_for(version).bucket_group_flags) == flags
