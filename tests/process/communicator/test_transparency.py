"""A handle behaves like the stock backend: for frameworks, before and after a swap, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from deadpool.communicator.extension import SwapBackend
from deadpool.errors import IntegrationError
from tests.process.communicator.cluster import Seat, gap_of_the_fallback, run_all

Check = Callable[[int, dist.ProcessGroup], bool]


def _ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((4,), float(value))


def _send_and_receive(rank: int, group: dist.ProcessGroup) -> bool:
    if rank == 0:
        dist.send(_ones(7), 1, tag=11)
        dist.send(_ones(8), 1)
        return True
    tagged, from_any = torch.zeros(4), torch.zeros(4)
    dist.recv(tagged, 0, tag=11)
    return dist.recv(from_any) == 0 and bool(tagged[0] == 7 and from_any[0] == 8)


def _batched(rank: int, group: dist.ProcessGroup) -> bool:
    received, other = torch.zeros(4), 1 - rank
    ops = [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, _ones(rank), other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return bool(received[0] == other)


def _objects(rank: int, group: dist.ProcessGroup) -> bool:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    sent = [f"from {rank}"]
    dist.broadcast_object_list(sent, 1)
    return gathered[1]["rank"] == 1 and sent == ["from 1"]


def _gather_and_scatter(rank: int, group: dist.ProcessGroup) -> bool:
    gathered = [torch.zeros(4) for _ in range(2)] if rank == 0 else None
    dist.gather(_ones(rank), gathered, 0)
    mine = torch.zeros(4)
    dist.scatter(mine, [_ones(5), _ones(6)] if rank == 0 else None, 0)
    return bool(mine[0] == 5 + rank) and (gathered is None or bool(gathered[1][0] == 1))


def _reduce_scatter(rank: int, group: dist.ProcessGroup) -> bool:
    out, listed = torch.zeros(4), torch.zeros(4)
    dist.reduce_scatter_tensor(out, torch.arange(8.0))
    dist.reduce_scatter(listed, [_ones(1), _ones(2)])
    return bool(out[0] == 8 * rank) and bool(listed[0] == 2 * (rank + 1))


def _all_to_all(rank: int, group: dist.ProcessGroup) -> bool:
    out = torch.zeros(4)
    dist.all_to_all_single(out, _ones(rank))
    return out.tolist() == [0, 0, 1, 1]


def _all_gather(rank: int, group: dist.ProcessGroup) -> bool:
    whole = torch.zeros(8)
    dist.all_gather_into_tensor(whole, _ones(rank))
    listed = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(listed, _ones(rank))
    return whole.tolist() == torch.cat(listed).tolist() == [0] * 4 + [1] * 4


def _functional(rank: int, group: dist.ProcessGroup) -> bool:
    total = functional.all_reduce(_ones(), "sum", group)
    gathered = functional.all_gather_tensor(_ones(rank), 0, group)
    part = functional.reduce_scatter_tensor(torch.arange(8.0), "sum", 0, group)
    return bool(total[0] == 2 and gathered[4] == 1 and part[0] == 8 * rank)


def _coalesced(rank: int, group: dist.ProcessGroup) -> bool:
    first, second = _ones(), _ones(2)
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(first)
        dist.all_reduce(second)
    return bool(first[0] == 2 and second[0] == 4)


def _new_group(rank: int, group: dist.ProcessGroup) -> bool:
    made = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    total = _ones()
    dist.all_reduce(total, group=made)
    return bool(total[0] == 2)


def _barriers(rank: int, group: dist.ProcessGroup) -> bool:
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    return True


def _names(rank: int, group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo" and dist.get_world_size() == 2


def _mesh(rank: int, group: dist.ProcessGroup) -> bool:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    total = _ones()
    dist.all_reduce(total, group=mesh["tp"].get_group())
    whole = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)]).redistribute(
        mesh["tp"], [Replicate()]
    )
    return bool(total[0] == 2) and whole.to_local().sum().item() == 28


CHECKS: tuple[Check, ...] = (
    _send_and_receive,
    _batched,
    _objects,
    _gather_and_scatter,
    _reduce_scatter,
    _all_to_all,
    _all_gather,
    _functional,
    _coalesced,
    _new_group,
    _barriers,
    _names,
    _mesh,
)


def use_every_collective(seat: Seat) -> list[str]:
    communicators = seat.join()
    group = dist.group.WORLD
    assert group is not None
    failed = []
    for generation in (1, 2):
        if generation == 2:
            communicators.close(1)
            communicators.open(2, seat.store(2))
        for check in CHECKS:
            seat.meet(f"{generation} {check.__name__}")
            if not check(seat.rank, group):
                failed.append(f"generation {generation}: {check.__name__}")
    seat.meet("end")
    return failed


def test_every_collective_works_before_and_after_a_swap() -> None:
    assert run_all(use_every_collective, 2) == [[], []]


def look_at_the_types(seat: Seat) -> list[str]:
    seat.join()
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    seat.meet("end")
    return [type(group).__name__ for group in groups]


@gap_of_the_fallback("batched sends and receives are not coalesced", raises=AssertionError)
def test_groups_are_of_the_stock_type_so_that_torch_coalesces_batched_sends() -> None:
    assert run_all(look_at_the_types, 2) == [["ProcessGroup"] * 2] * 2


def call_through_the_dispatcher(seat: Seat) -> float:
    seat.join()
    value, group = _ones(seat.rank + 1), dist.group.WORLD
    assert group is not None
    try:
        _, work = torch.ops.c10d.broadcast_([value], group.boxed(), 0, 0, False, -1)
        c10d.Work.unbox(work).wait()
    finally:
        seat.meet("end")
    return value[0].item()


@gap_of_the_fallback("calls by torch.ops.c10d find no backend", raises=AssertionError)
def test_the_operators_of_the_dispatcher_reach_a_handle() -> None:
    assert run_all(call_through_the_dispatcher, 2) == [1.0, 1.0]


def make_an_nccl_handle(seat: Seat) -> str:
    seat.join()
    try:
        kind = SwapBackend(seat.rank, 2, "nccl", c10d.Backend.Options("nccl")).kind
    except IntegrationError as error:
        kind = str(error)
    seat.meet("end")
    return kind


@gap_of_the_fallback("NCCL is refused", raises=AssertionError)
def test_a_handle_can_be_of_kind_nccl() -> None:
    assert run_all(make_an_nccl_handle, 2) == ["nccl", "nccl"]


def _train(rank: int) -> list[str]:
    """Digests of losses and parameters of a DDP and an FSDP2 run."""
    digests = []
    for kind in ("ddp", "fsdp2"):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(50, 50) for _ in range(3)]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        if kind == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=0.01)
        else:
            for layer in layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        found = hashlib.sha256()
        for step in range(6):
            generator = torch.Generator().manual_seed(step * 10 + rank)
            loss = model(torch.randn(8, 50, generator=generator)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.update(loss.detach().numpy().tobytes())
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            found.update(local.detach().numpy().tobytes())
        digests.append(found.hexdigest())
    return digests


def train_stock(seat: Seat) -> list[str]:
    dist.init_process_group("gloo", store=seat.store(1), rank=seat.rank, world_size=seat.world_size)
    digests = _train(seat.rank)
    seat.meet("end")
    return digests


def train_through_handles(seat: Seat) -> list[str]:
    seat.join()
    digests = _train(seat.rank)
    seat.meet("end")
    return digests


def test_training_through_handles_equals_training_on_stock_gloo_bit_for_bit() -> None:
    assert run_all(train_through_handles, 2) == run_all(train_stock, 2)
