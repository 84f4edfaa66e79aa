"""What needs no peers: names, environment, and which errors count as a failed collective."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from deadpool.communicator.extension import native
from deadpool.communicator.groups import Communicators
from deadpool.communicator.inner import make_nccl
from deadpool.communicator.nccl_environment import NCCL_ENVIRONMENT, nccl_environment_problems
from deadpool.errors import CollectiveAborted, IntegrationError

GLOO_RESET = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4"


def _judge(error: BaseException) -> bool:
    return Communicators.failed_collective(error)


@pytest.mark.parametrize(
    "error",
    [
        CollectiveAborted("group '0'"),
        RuntimeError(GLOO_RESET),
        RuntimeError("NCCL error in: x.cu, remote process exited"),
        dist.DistBackendError("anything"),
        dist.DistNetworkError("anything"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
    ],
    ids=repr,
)
def test_errors_of_collectives_are_recognised(error: BaseException) -> None:
    assert _judge(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shape '[2]' is invalid"), ValueError(GLOO_RESET), KeyError("k"), MemoryError()],
    ids=repr,
)
def test_errors_of_the_script_are_not_taken_for_collectives(error: BaseException) -> None:
    assert not _judge(error)


def test_an_error_that_a_script_wrapped_is_recognised_by_its_cause() -> None:
    wrapped = ValueError("cannot train")
    wrapped.__cause__ = RuntimeError(GLOO_RESET)
    while_handling = KeyError("cleanup")
    while_handling.__context__ = wrapped
    assert _judge(while_handling)


def test_a_cycle_of_causes_ends() -> None:
    first, second = KeyError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    assert not _judge(first)


def test_names_are_hashed_with_fnv() -> None:
    assert native.name_hash("") == 0xCBF29CE484222325
    assert native.name_hash("a") == 0xAF63DC4C8601EC8C


def test_every_variable_that_lets_others_abort_nccl_is_named() -> None:
    assert nccl_environment_problems(NCCL_ENVIRONMENT) == []
    wrong = {**NCCL_ENVIRONMENT, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    del wrong["NCCL_NVLS_ENABLE"]
    problems = nccl_environment_problems(wrong)
    assert len(problems) == 2
    assert any("TORCH_NCCL_ASYNC_ERROR_HANDLING is '3' and must be '0'" in problem for problem in problems)
    assert any("NCCL_NVLS_ENABLE is 'not set'" in problem for problem in problems)


def test_nccl_is_refused_where_it_could_not_be_aborted() -> None:
    with pytest.raises(IntegrationError, match=r"no NCCL|environment of an NCCL worker"):
        make_nccl(HashStore(), 0, 1, None)


@pytest.mark.parametrize("module", ["rendezvous_server", "rendezvous_wire"])
def test_the_agents_side_loads_no_torch(module: str) -> None:
    code = f"import sys, deadpool.communicator.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
