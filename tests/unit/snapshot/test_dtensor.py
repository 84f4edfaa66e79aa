"""A process that builds as one rank and then as another, as a spare does."""

from __future__ import annotations

import subprocess
import sys

BUILD_TWICE = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool.snapshot.frameworks.dtensor import forget_meshes

for rank in (0, 1):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=mesh)
    sharded = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False)
    places = [
        tensor.device_mesh.get_coordinate()
        for tensor in (model.weight, sharded + 1, sharded.redistribute(mesh, [Replicate()]) * 2)
    ]
    dist.destroy_process_group()
    del mesh, model, sharded
    if "forget" in sys.argv:
        forget_meshes()
assert places == [(1,)] * 3, places
"""


def build_twice(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUILD_TWICE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


def test_tensors_of_a_second_build_know_the_rank_that_they_belong_to() -> None:
    done = build_twice("forget")
    assert done.returncode == 0, done.stderr


def test_without_forgetting_torch_gives_them_the_rank_of_the_first_build() -> None:
    assert "AssertionError: [(0,)" in build_twice().stderr
