"""megatron-core in the test process: one rank, on the CPU, gone without a trace after each test."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from deadpool.testing import megatron_cpu
from tests.plugins.megatron.drill import Drill, MakeDrill


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron calls torch by older names, and says in many places that Apex is missing."""
    needs_no_gpu = "Megatron on the CPU needs CUDA_VISIBLE_DEVICES= where there is a GPU; tests/gpu uses it"
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.skipif(torch.cuda.is_available(), reason=needs_no_gpu))


@cache
def _leave_out_what_stays() -> None:
    """Hide the modules, a million objects, from the collections below: each of them took 0.3 s."""
    gc.collect()
    gc.freeze()


@contextmanager
def megatron_on_cpu() -> Iterator[MakeDrill]:
    """Builds training as the example does. One at a time: what was built before is forgotten."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron_cpu.install()
        example: Any = import_module("examples.megatron_gpt")
        objects = import_module("deadpool.plugins.megatron.objects")
    _leave_out_what_stays()
    logging.getLogger("megatron").setLevel(logging.ERROR)  # the stand-in has one generator for two
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=c10d.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )

    def make(*options: str) -> Drill:
        objects.forget_build()
        return Drill(example, options)

    yield make
    objects.forget_build()
    dist.destroy_process_group()
    # Modules and groups refer to one another, through C++ too: each pass frees what holds the next.
    for _ in range(4):
        gc.collect()
    torch.set_num_threads(threads)
    megatron_cpu.remove()


@pytest.fixture
def make_drill() -> Iterator[MakeDrill]:
    with megatron_on_cpu() as make:
        yield make


@pytest.fixture(scope="module")
def shared_drill() -> Iterator[Drill]:
    """For tests that put back what they change."""
    with megatron_on_cpu() as make:
        yield make("--dtype", "bf16", "--overlap")
