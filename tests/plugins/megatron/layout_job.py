"""The example, in which each step also looks at what recoveries may leave behind.

Each rank sends its number through every group of its layout; handles, hooks and memory are checked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from deadpool.runtime.session import session
from examples import megatron_gpt as gpt

parallel_state: Any = vars(gpt)["parallel_state"]  # megatron is imported after the stand-in for the device

GROUPS = {
    "tensor": parallel_state.get_tensor_model_parallel_group,
    "data": parallel_state.get_data_parallel_group,
    "pipeline": parallel_state.get_pipeline_model_parallel_group,
    "model": parallel_state.get_model_parallel_group,
}


MOST_GROWTH = 1.05  # of resident memory, from the first recovery to the second


class Trainer(gpt.Trainer):
    def __init__(self, arguments: Any) -> None:
        super().__init__(arguments)
        self.hooks = 0  # known after the first step, in which modules add some of their own
        self.resident: dict[int, int] = {}  # generation -> bytes after its second step

    def count_hooks(self) -> int:
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for chunk in self.chunks
            for module in chunk.modules()
        )

    def check_rebuilt(self) -> None:
        """Every handle is of this generation, no hook is doubled, and a second rebuild costs no memory."""
        joined = session()
        if joined is None:
            return
        assert {handle.generation for handle in joined.communicators.handles()} == {joined.generation}
        self.hooks = self.hooks or self.count_hooks()
        assert self.count_hooks() == self.hooks
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident[joined.generation] = resident
        earlier = self.resident.get(joined.generation - 1)
        if joined.generation > 2 and earlier is not None:
            assert resident <= MOST_GROWTH * earlier, (resident, earlier)

    def step(self, data_iterator: Any) -> dict[str, Any]:
        values: dict[str, Any] = super().step(data_iterator)
        self.check_rebuilt()
        mine = torch.tensor([dist.get_rank()])
        for name, group in GROUPS.items():
            ranks = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group()))]
            dist.all_gather(ranks, mine, group=group())
            assert torch.cat(ranks).tolist() == dist.get_process_group_ranks(group())
            values[name] = torch.cat(ranks)
        return values


if __name__ == "__main__":
    # Taken back at the end: a spare runs this file twice, and must not derive from its first Trainer.
    with patch.object(gpt, "Trainer", Trainer):
        gpt.main()
