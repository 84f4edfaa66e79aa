"""ZeRO stage 3: parameters are partitioned, too, and gathered module by module.

[Note: the trace of the modules]
After two steps DeepSpeed prefetches by a recorded order of modules, which every rank must follow alike: each
prefetch is a collective. A promoted spare has no such record. So after an abort every rank drops it and
records again; if only one of them did, all would wait for one another without an error. For the same reason
small parameters, which stay gathered between steps, are released on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param

from deadpool.plugins.deepspeed.leftovers import Entry, becomes, called, emptied
from deadpool.plugins.deepspeed.parts import FlatPart
from deadpool.snapshot.optimizer_state import create_missing_state

COORDINATOR = "optimizer.parameter_offload.param_coordinator"
PRIVATE = f"{COORDINATOR}._PartitionedParameterCoordinator__"
STACK = "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK"


def _invalidate(owner: Any, name: str) -> None:
    setattr(owner, name, type(getattr(owner, name)).INVALID)


def _forget_results(owner: Any, name: str) -> None:
    """A spare has no cached results: ranks that do could release other parameters than it."""
    cached_method(type(owner), name).cache_clear()


def cached_method(owner: type, name: str) -> Any:
    """A method with a cache, which DeepSpeed hides behind a wrapper without a way to it."""
    method = getattr(owner, name)
    while not hasattr(method, "cache_clear"):
        cells = [cell.cell_contents for cell in method.__closure__ or ()]
        method = next(content for content in cells if callable(content))
    return method


def _release(param: Any, name: str) -> None:
    """Let go of a gathered parameter, or of one whose gathering will never end."""
    if getattr(param, name) is not ZeroParamStatus.NOT_AVAILABLE:
        free_param(param)


class Zero3Part(FlatPart):
    """`DeepSpeedZeroOptimizer_Stage3`, in bf16, fp16 and fp32."""

    partitions = "fp32_partitioned_groups_flat"
    model_groups = "fp16_groups"

    def __init__(self, name: str, engine: Any) -> None:
        super().__init__(name, engine)
        roots = len(parameter_offload.FWD_MODULE_STACK)  # one for each engine of this stage

        def unwind(owner: Any, attribute: str) -> None:
            del getattr(owner, attribute)[roots:]

        self.leftovers = (
            becomes("optimizer._backward_hook_state.backward_active_depth", 0),
            becomes("optimizer._backward_hook_state.remaining_grad_acc_hooks", 0),
            called("optimizer._backward_hook_state.reset_for_new_step"),
            becomes("optimizer.micro_step_id", 0),
            called("optimizer.ipg_buckets[*].clear_params"),
            emptied("optimizer.averaged_gradients"),
            emptied("optimizer._offload_boundary_param_ids"),
            Entry(STACK, unwind),
            becomes("module.modules[*]._parameters._in_forward", False),
            becomes("module.modules[*].ds_grads_remaining", 0, is_lazy=True),
            becomes("module.modules[*].applied_pre_backward_ref_cnt", 0, is_lazy=True),
            emptied("module.parameters[*].ds_active_sub_modules"),
            Entry("module.parameters[*].ds_status", _release),
            emptied(f"{PRIVATE}inflight_param_registry"),  # not waited for: their communicator is gone
            emptied(f"{PRIVATE}active_backward_submodules"),
            Entry(f"{PRIVATE}trace_mode", _invalidate),
            called(f"{COORDINATOR}._clear_trace_structures"),
            becomes(f"{PRIVATE}step_id", 0),
            becomes(f"{PRIVATE}n_available_params", 0),
            Entry(f"{PRIVATE}params_to_release", _forget_results),
        )

    def frozen(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        updated = {id(param) for param in self.updated()}
        for name, param in self.engine.module.named_parameters():
            if id(param) not in updated:
                yield f"module.{name}", param.ds_tensor, ()  # partitioned like all others

    def compute_again(self) -> None:
        flats = zip(
            self.optimizer.fp16_partitioned_groups_flat,
            self.optimizer.fp32_partitioned_groups_flat,
            strict=True,
        )
        for flat, master in flats:
            flat.data.copy_(master.data)

    def create_state(self) -> list[str]:
        """As for every optimizer; its groups are empty but for the moment in which a partition is updated."""
        self._clear_padding()
        groups = self.base.param_groups
        for index, partition in enumerate(self.optimizer.fp32_partitioned_groups_flat):
            groups[self.optimizer.sub_group_to_group_id[index]]["params"].append(partition)
        try:
            return create_missing_state(f"{self.name}.optimizer", self.base)
        finally:
            for group in groups:
                group["params"] = []

    def _clear_padding(self) -> None:
        """Set to zero what pads the partitions of the last ranks.

        DeepSpeed leaves it uninitialised and never reads it: two runs would differ in bytes without meaning.
        """
        with torch.no_grad():
            for param in self.engine.module.parameters():
                param.ds_tensor.data[_used(param) :].zero_()
            groups = zip(self.optimizer.fp16_groups, self.optimizer.fp32_partitioned_groups_flat, strict=True)
            for params, flat in groups:
                offset = 0
                for param in params:
                    end = offset + param.partition_numel()
                    flat.data[offset + _used(param) : end].zero_()
                    offset = end


def _used(param: Any) -> int:
    """How many elements of this rank's partition belong to the parameter."""
    size: int = param.partition_numel()
    begin = dist.get_rank(param.ds_process_group) * size
    return max(0, min(size, int(param.ds_numel) - begin))
