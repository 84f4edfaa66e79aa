"""FSDP2: after an abort at any collective of a step, the step run again has the undisturbed bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from deadpool.snapshot.frameworks import fsdp
from deadpool.snapshot.stateful import collect
from tests.unit.snapshot.support import Aborted, Keeper, bits, digest, keeping, run_ranks

WIDTH = 10  # not divisible by 4: padded shards
# What FSDP2 calls: torch 2.13 renamed the first two to the last two.
GATHERS = ("all_gather_into_tensor", "all_gather_single")
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")
COLLECTIVES = tuple(name for name in (*GATHERS, *SCATTERS, "all_reduce") if hasattr(dist, name))


@dataclass(frozen=True, kw_only=True)
class Case:
    reshard: bool = True
    low_precision: bool = False
    micro_batches: int = 1
    prefetch: bool = False
    unshard_async: bool = False
    hybrid: bool = False
    zero_in_place: bool = False


CASES = {
    "plain": Case(),
    "kept unsharded after forward": Case(reshard=False, zero_in_place=True),
    "mixed precision with accumulation": Case(low_precision=True, micro_batches=2),
    "explicit prefetch, asynchronous": Case(prefetch=True, unshard_async=True),
    "hybrid sharding with accumulation": Case(hybrid=True, micro_batches=2),
}


class Failing(dist.distributed_c10d.Work):
    """Work whose wait raises, as that of an aborted asynchronous collective does."""

    def wait(self, *_: Any) -> bool:
        raise Aborted("wait")


class Injector:
    """Counts the collectives of FSDP2 and lets the k-th one fail, on all ranks alike."""

    def __init__(self) -> None:
        self.count = 0
        self.fail_at: int | None = None
        self.calls: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        real = {name: getattr(dist, name) for name in COLLECTIVES}
        for name in COLLECTIVES:
            setattr(dist, name, self._wrap(name, real[name]))
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(dist, name, function)

    def arm(self, fail_at: int | None) -> None:
        self.count, self.fail_at = 0, fail_at
        self.calls.clear()

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.calls.append(name)
            if self.count == self.fail_at:
                if kwargs.get("async_op"):
                    return Failing()
                raise Aborted(name)
            return function(*args, **kwargs)

        return call


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)  # buffers stay float32 under mixed precision
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.last(self.norm(hidden))  # type: ignore[no-any-return]


def build(case: Case) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if case.low_precision
        else MixedPrecisionPolicy()
    )
    shape, names = ((2, 1), ("replicate", "shard")) if case.hybrid else ((2,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    if case.prefetch:
        blocks = list(model.blocks)
        for ahead, behind in pairwise(blocks):
            assert isinstance(ahead, FSDPModule) and isinstance(behind, FSDPModule)
            ahead.set_modules_to_forward_prefetch([behind])
            behind.set_modules_to_backward_prefetch([ahead])
    if case.unshard_async:
        assert isinstance(model, FSDPModule)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module._set_unshard_async_op(True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run_step(case: Case, model: Net, optimizer: torch.optim.Optimizer, step: int) -> str:
    assert isinstance(model, FSDPModule)
    losses = []
    for micro in range(case.micro_batches):
        model.set_requires_gradient_sync(micro == case.micro_batches - 1)
        seed = (step * 10 + micro) * 10 + dist.get_rank()
        inputs = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = model(inputs).float().pow(2).mean()
        loss.backward()
        losses.append(bits(loss))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=not case.zero_in_place)
    return ",".join(losses)


def abort_at_every_collective(rank: int, case: Case) -> dict[str, Any]:
    """Abort step 3 at each of its collectives in turn; after each, run it again from snapshot 2."""
    model, optimizer = build(case)
    injector = Injector()
    with injector.installed(), keeping(collect({"model": model, "optimizer": optimizer})) as keeper:
        for step in (1, 2):
            run_step(case, model, optimizer, step)
        flags = [fsdp.read_flags(states) for _, states in keeper.state.fsdp]
        blob = keeper.take(step=2)
        injector.arm(None)
        expected = [run_step(case, model, optimizer, 3), digest(keeper.state)]
        calls = list(injector.calls)
        differing = []
        for fail_at in range(1, len(calls) + 1):
            keeper.go_back(blob)
            injector.arm(fail_at)
            with pytest.raises(Aborted):
                run_step(case, model, optimizer, 3)
            injector.arm(None)
            keeper.go_back(blob)
            is_reset = flags == [fsdp.read_flags(states) for _, states in keeper.state.fsdp]
            again = [run_step(case, model, optimizer, 3), digest(keeper.state)]
            if again != expected or injector.calls != calls or not is_reset:
                differing.append(fail_at)
        keeper.drain()
        return {
            "differing": differing,
            "calls": calls,
            "ended": keeper.ended,
            "spare": restore_new_model(case, keeper, blob) == expected,
        }


def restore_new_model(case: Case, source: Keeper, blob: bytes) -> list[str]:
    """What a promoted spare does: a new build, restored from the banks of the rank that it replaces."""
    model, optimizer = build(case)
    with keeping(collect({"model": model, "optimizer": optimizer})) as spare:
        spare.layout.check_same(source.layout)
        spare.banks[0] = source.banks[0]
        spare.go_back(blob)
        return [run_step(case, model, optimizer, 3), digest(spare.state)]


def abort_without_reset(rank: int, case: Case) -> int:
    """The number of collectives after whose abort the step cannot simply be run again."""
    broken = 0
    for fail_at in range(1, 9):
        model, optimizer = build(case)
        injector = Injector()
        with injector.installed(), keeping(collect({"model": model, "optimizer": optimizer})) as keeper:
            run_step(case, model, optimizer, 1)
            blob = keeper.take(step=1)
            expected = [run_step(case, model, optimizer, 2), digest(keeper.state)]
            keeper.go_back(blob)
            injector.arm(fail_at)
            with pytest.raises(Aborted):
                run_step(case, model, optimizer, 2)
            injector.arm(None)
            keeper.go_back(blob, reset=False)
            try:
                broken += [run_step(case, model, optimizer, 2), digest(keeper.state)] != expected
            except (AttributeError, AssertionError, RuntimeError):
                broken += 1
    return broken


@pytest.mark.parametrize("name", CASES)
def test_a_step_aborted_at_any_collective_runs_again_with_the_same_bits(name: str) -> None:
    for result in run_ranks(abort_at_every_collective, 2, CASES[name]):
        assert result["differing"] == []
        assert result["spare"]
        assert result["ended"] == [(0, None)]
        assert len(result["calls"]) >= 4
        if CASES[name].hybrid:
            assert set(result["calls"]) == {"all_reduce"}
        else:
            assert any(call in GATHERS for call in result["calls"])
            assert any(call in SCATTERS for call in result["calls"])


def test_without_the_reset_an_aborted_step_cannot_be_run_again() -> None:
    for broken in run_ranks(abort_without_reset, 2, CASES["plain"]):
        assert broken > 0
