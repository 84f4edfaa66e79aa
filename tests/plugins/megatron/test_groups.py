"""How many groups megatron makes: what a recovery has to build anew."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool.testing import megatron_cpu


@pytest.fixture
def parallel_state() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron_cpu.install()
        yield import_module("megatron.core.parallel_state")
    megatron_cpu.remove()


COUNTS = {"0.16": ((77, 20), (353, 20)), "0.19": ((95, 23), (485, 23))}
"""Version of megatron-core -> groups made, and those of rank 0, for each of the two layouts below."""


@pytest.mark.parametrize(("layout", "world_size", "tensor", "pipeline"), [(0, 8, 2, 2), (1, 64, 4, 4)])
def test_the_groups_of_a_layout_are_counted(
    parallel_state: Any,
    monkeypatch: pytest.MonkeyPatch,
    layout: int,
    world_size: int,
    tensor: int,
    pipeline: int,
) -> None:
    made: list[bool] = []
    create = parallel_state.create_group

    def count(ranks: list[int], **options: Any) -> Any:
        made.append(0 in ranks)
        return create(ranks, **{**options, "backend": None})

    monkeypatch.setattr(parallel_state, "create_group", count)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(tensor, pipeline)
        version = ".".join(metadata.version("megatron-core").split(".")[:2])
        assert (len(made), sum(made)) == COUNTS[version][layout]
    finally:
        import_module("deadpool.plugins.megatron.objects").forget_build()
        dist.destroy_process_group()
