"""DDP: after an aborted forward or backward every rank installs the same buckets and the bits go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from deadpool.errors import LayoutMismatch
from deadpool.snapshot.blob import read_blob, why_not_now
from deadpool.snapshot.layout import Kind
from deadpool.snapshot.stateful import TrainingState, collect, hash_replicated
from tests.unit.snapshot.support import Aborted, Keeper, bits, digest, keeping, run_ranks

WIDTH = 24
BUCKET_CAP_MB = 0.002  # less than one weight: several buckets


@dataclass(frozen=True, kw_only=True)
class Case:
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    zero_in_place: bool = False
    micro_batches: int = 1


CASES = {
    "plain": Case(),
    "gradients as bucket views, zeroed in place": Case(gradient_as_bucket_view=True, zero_in_place=True),
    "unused parameters searched": Case(find_unused_parameters=True),
    "accumulation without synchronisation": Case(micro_batches=2),
}


class Finished(dist.distributed_c10d.Work):
    """Work that is done."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, *_: Any) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


class ServingGroup(dist.ProcessGroup):
    """Gloo underneath; serves broadcasts from a queue, and lets the k-th collective fail on all ranks."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner
        self.served: list[torch.Tensor] = []
        self.count = 0
        self.fail_at: int | None = None

    def serve(self, group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> None:
        assert group is self
        self.served.extend(tensors)

    def arm(self, fail_at: int | None) -> None:
        self.count, self.fail_at = 0, fail_at

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        if self.served:
            tensors[0].copy_(self.served.pop(0))
            return Finished(tensors)
        self._count()
        self._inner.broadcast(tensors, options or dist.BroadcastOptions()).wait()
        return Finished(tensors)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        self._count()
        self._inner.allreduce(tensors, options or dist.AllreduceOptions()).wait()
        return Finished(tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        self._count()
        self._inner.allgather(outputs, inputs, options or AllgatherOptions()).wait()
        return Finished(outputs[0])

    def getSize(self) -> int:
        return self._inner.size()

    def size(self) -> int:
        return self._inner.size()

    def rank(self) -> int:
        return self._inner.rank()

    def getBackendName(self) -> str:
        return "serving"

    def _count(self) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise Aborted(f"collective {self.count}")


class Branches(nn.Module):
    """Gradients become ready in another order on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order = ("abc", "cab", "bca")[rank]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(inputs)))
        found = {name: torch.tanh(getattr(self, name)(hidden)) for name in self.order}
        return nn.functional.dropout(found["a"] + found["b"] + found["c"], 0.1, self.training)


class Job:
    """One rank: a DDP model on a serving group, its optimizer and its state."""

    def __init__(self, rank: int, case: Case, group: ServingGroup, *, init_sync: bool = True) -> None:
        self.case, self.rank, self.group = case, rank, group
        torch.manual_seed(5)
        self.model = DistributedDataParallel(
            Branches(rank),
            process_group=group,
            bucket_cap_mb=BUCKET_CAP_MB,
            init_sync=init_sync,
            gradient_as_bucket_view=case.gradient_as_bucket_view,
            find_unused_parameters=case.find_unused_parameters,
        )
        torch.manual_seed(100 + rank)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: TrainingState = collect({"model": self.model, "optimizer": self.optimizer})

    def run(self, *steps: int) -> list[str]:
        found = []
        for step in steps:
            for micro in range(self.case.micro_batches):
                self.model.require_backward_grad_sync = micro == self.case.micro_batches - 1
                seed = (step * 10 + micro) * 10 + self.rank
                inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
                loss = self.model(inputs).pow(2).mean()
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not self.case.zero_in_place)
            found += [bits(loss), digest(self.state)]
        return found


def make_group() -> ServingGroup:
    inner = dist.group.WORLD
    assert inner is not None
    group = ServingGroup(inner)
    world = distributed_c10d._world
    world.pg_map[group] = ("serving", None)  # type: ignore[assignment]
    world.pg_names[group] = distributed_c10d.GroupName("serving")
    world.pg_group_ranks[group] = {rank: rank for rank in range(inner.size())}
    return group


def abort_everywhere(rank: int, case: Case) -> dict[str, Any]:
    """From snapshot 3, abort step 4 at each collective; from snapshot 0, abort steps 1 to 3 at each."""
    group = make_group()
    job = Job(rank, case, group)
    differing: list[str] = []
    with keeping(job.state, group.serve) as keeper:
        start = keeper.take(step=0)
        from_start = job.run(1)
        unsettled = why_not_now(job.state, has_stepped=True)
        from_start += job.run(2, 3)
        buckets = job.state.ddp[0].rebuilt
        third = keeper.take(step=3, bank=1)
        group.arm(None)
        after_third = job.run(4)
        per_step = group.count
        after_third += job.run(5)
        for fail_at in range(1, per_step + 1):
            _abort(keeper, job, group, fail_at, steps=(4,))
            keeper.go_back(third, bank=1)
            if job.run(4, 5) != after_third:
                differing.append(f"step 4, collective {fail_at}")
        # In step 1, in the broadcasts of the rebuild at the start of step 2, with rebuilt buckets in step 3.
        every = (1, per_step, per_step + 1, per_step + 2, 2 * per_step + 3)
        for fail_at in every if case == CASES["plain"] else every[2:]:
            keeper.go_back(start)
            _abort(keeper, job, group, fail_at, steps=(1, 2, 3))
            keeper.go_back(start)
            if job.run(1, 2, 3) != from_start or job.state.ddp[0].rebuilt != buckets:
                differing.append(f"from the start, collective {fail_at}")
        hashes = hash_replicated(job.state, keeper.layout)
        takeover = _take_over(rank, case, group, keeper, third)
    return {
        "differing": differing,
        "per_step": per_step,
        "unsettled": unsettled,
        "buckets": buckets,
        "takeover": takeover == [buckets, *after_third],
        "ended": keeper.ended,
        "hashes": hashes,
        "kinds": sorted({buffer.kind.value for buffer in keeper.layout.buffers}),
    }


def _abort(keeper: Keeper, job: Job, group: ServingGroup, fail_at: int, steps: tuple[int, ...]) -> None:
    group.arm(fail_at)
    with pytest.raises(Aborted):
        job.run(*steps)
    group.arm(None)


def _take_over(rank: int, case: Case, group: ServingGroup, source: Keeper, blob: bytes) -> list[Any]:
    """Rank 1 is a spare with a new DDP object, the others are survivors. All install the same layout."""
    if rank != 1:
        source.go_back(blob, bank=1)
        job = Job.__new__(Job)
        job.case, job.rank, job.group = case, rank, group
        job.model = source.state.ddp[0].ddp
        job.optimizer = source.state.optimizers[0][1]
        job.state = source.state
        found: list[Any] = [job.state.ddp[0].rebuilt]
        return found + job.run(4, 5)
    job = Job(rank, case, group, init_sync=False)
    with keeping(job.state, group.serve) as keeper:
        keeper.layout.check_same(source.layout)
        keeper.banks = source.banks
        keeper.go_back(blob, bank=1)
        found = [job.state.ddp[0].rebuilt]
        return found + job.run(4, 5)


def restore_with_other_buckets(rank: int) -> dict[str, Any]:
    """Snapshot 3 restored with the initial buckets, and with a layout that does not fit."""
    group = make_group()
    job = Job(rank, CASES["plain"], group)
    buckets = job.state.ddp[0]
    with keeping(job.state, group.serve) as keeper:
        job.run(1, 2, 3)
        blob = keeper.take(step=3)
        expected = job.run(4)
        keeper.go_back(blob)
        buckets.install(None, group.serve)
        other = job.run(4)
        with pytest.raises(LayoutMismatch, match=r"model: .* names 2 parameters, this DDP module reduces 10"):
            buckets.install(((0, 1),), group.serve)
        return {"same_bits": expected == other, "stored": read_blob(blob).parts["ddp"]["model"]["buckets"]}


@pytest.mark.parametrize("name", CASES)
def test_an_aborted_step_runs_again_with_the_same_bits_on_survivors_and_spare(name: str) -> None:
    results = run_ranks(abort_everywhere, 3, CASES[name])
    for result in results:
        assert result["differing"] == []
        assert result["takeover"]
        assert result["per_step"] >= 3
        assert result["kinds"] == [Kind.REPLICATED.value, Kind.UNIQUE.value]
        assert [reason for _, reason in result["ended"]] == [None, None]
        if CASES[name].find_unused_parameters:
            assert result["buckets"] is None and result["unsettled"] is None
        else:
            assert len(result["buckets"]) >= 3
            assert "rebuilds its buckets" in result["unsettled"]
    assert len({str(result["buckets"]) for result in results}) == 1
    assert len({str(result["hashes"]) for result in results}) == 1, "parameters and optimizer state agree"


def test_another_bucket_layout_gives_other_bits_so_the_blob_carries_it() -> None:
    results = run_ranks(restore_with_other_buckets, 3)
    assert not any(result["same_bits"] for result in results)
    assert all(len(result["stored"]) >= 3 for result in results)
