"""ZeRO stages 1 and 2: every rank updates its own flat partition, and all ranks gather the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

from deadpool.plugins.deepspeed.leftovers import Entry, becomes, called, emptied
from deadpool.plugins.deepspeed.parts import FlatPart, ranks_of


def _all_false(owner: Any, name: str) -> None:
    flags = getattr(owner, name)
    flags[:] = [False] * len(flags)


class GatheredPart(FlatPart):
    """After each step all partitions are gathered into flat parameters, named by `flat_parameters`.

    A spare has them from any healthy rank. To cast them from the masters again would take those of all ranks.
    """

    flat_parameters: ClassVar[str]

    def replicated(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        flats = getattr(self.optimizer, self.flat_parameters)
        for index, (flat, group) in enumerate(zip(flats, self.optimizer.real_dp_process_group, strict=True)):
            yield f"parameters{index}", flat, ranks_of(group)
        yield from self.frozen()


class ZeroPart(GatheredPart):
    """`DeepSpeedZeroOptimizer`: stages 1 and 2, in bf16, fp16 and fp32."""

    partitions = "single_partition_of_fp32_groups"
    model_groups = "bit16_groups"
    flat_parameters = "bit16_groups_flat"
    leftovers = (
        becomes("optimizer._backward_hook_state.backward_active_depth", 0),
        becomes("optimizer._backward_hook_state.remaining_grad_acc_hooks", 0),
        called("optimizer._backward_hook_state.reset_for_new_step"),
        becomes("optimizer.micro_step_id", INITIAL_MICRO_STEP_ID),
        called("optimizer._release_ipg_buffers"),
        called("optimizer.ipg_buckets[*].clear"),
        becomes("optimizer.ipg_buckets[*].index", 0),
        Entry("optimizer.params_already_reduced", _all_false),
        emptied("optimizer.extra_large_param_to_reduce"),
        emptied("optimizer.averaged_gradients"),
        emptied("optimizer.all_grad_tensors"),
        becomes("optimizer.bit16_groups[*][*].grad_accum", None),
    )


class Bf16Part(GatheredPart):
    """`BF16_Optimizer`: stage 1 (or a pipeline) in bf16 with gradients accumulated in fp32."""

    partitions = "fp32_groups_flat_partition"
    model_groups = "bf16_groups"
    flat_parameters = "bf16_groups_flat"
    leftovers = (
        becomes("optimizer._backward_hook_state.backward_active_depth", 0),
        called("optimizer._backward_hook_state.reset_for_new_step"),
        called("optimizer.clear_hp_grads"),
        becomes("optimizer.fp32_groups_flat_partition[*].grad", None),
    )
