"""The constructor phase: recorded with peers, replayed without, and again in the same process."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deadpool.communicator.groups import Communicators
from deadpool.errors import CollectiveAborted, ReplayMismatch
from tests.process.communicator.cluster import START_S, Cluster, Seat, run_all

LARGE = 20_000  # floats: above what is always kept


def _numbers(rank: int, build: int) -> dict[str, Any]:
    """What a script may learn from its peers; nothing a spare could compute alone."""
    world = dist.get_world_size()
    found: dict[str, Any] = {}
    config = [{"id": os.urandom(8).hex(), "big": os.urandom(100_000).hex()}] if rank == 0 else [None]
    dist.broadcast_object_list(config, 0)
    found["config"] = config[0]
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, "h" * (rank + build) + str(os.getpid()))
    found["hosts"] = hosts
    found["ticket"] = dist.distributed_c10d._get_default_store().add("ticket", 1)
    order = torch.randperm(LARGE) if rank == 0 else torch.empty(LARGE, dtype=torch.int64)
    dist.broadcast(order, 0)
    found["order"] = order.sum().item(), order[:5].tolist()
    total = torch.rand(3)
    dist.all_reduce(total)
    found["total"] = total.tolist()
    return found


def _pipeline_first(rank: int) -> list[float]:
    """Both ranks post their receive before their send: waiting at issue would hang."""
    received = torch.zeros(2)
    work = dist.irecv(received, 1 - rank)
    dist.send(torch.full((2,), float(rank + 5)), 1 - rank)
    assert work is not None
    work.wait()
    return received.tolist()


def _threads(group: dist.ProcessGroup) -> tuple[list[float], list[Any]]:
    """A second thread uses a second group; the order across groups differs from run to run."""
    gathered: list[Any] = []

    def run() -> None:
        for number in range(10):
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, (number, os.getpid()), group=group)
            gathered.append(objects)

    thread = threading.Thread(target=run)
    thread.start()
    sums = []
    for number in range(10):
        value = torch.tensor([number + random.random()])
        dist.all_reduce(value)
        sums.append(value.item())
    thread.join(20)
    return sums, gathered


def _build(rank: int, build: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    group = dist.new_group([0, 1])
    dist.new_group([1])
    found = _numbers(rank, build)
    found["pipeline"] = _pipeline_first(rank)
    found["threads"] = _threads(group)
    layers = [torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 4)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    sharded = torch.nn.Linear(64, 64)
    fully_shard(sharded)
    found["random"] = random.random(), float(np.random.rand()), torch.rand(2).tolist()
    found["groups"] = sorted(str(name) for name in dist.distributed_c10d._world.pg_names.values())
    state = [*ddp.parameters(), *ddp.buffers(), *(p.to_local() for p in sharded.parameters())]  # type: ignore[attr-defined]
    return found, [tensor.detach() for tensor in state]


def _start(seat: Seat, rank: int, record: bytes) -> Communicators:
    communicators = seat.communicators(rank=rank)
    communicators.start_replay(record)
    communicators.init_process_group(None)
    return communicators


def record_build(seat: Seat) -> tuple[bytes, dict[str, Any]]:
    random.seed(seat.rank)
    np.random.seed(seat.rank)
    torch.manual_seed(seat.rank)
    communicators = seat.communicators()
    communicators.start_recording()
    communicators.init_process_group(seat.store(1))
    found, _ = _build(seat.rank, 0)
    record = communicators.finish_recording()
    seat.meet("recorded")
    return record, found


def replay_builds(seat: Seat) -> list[dict[str, Any]]:
    """As a parked spare does: once as rank 0, thrown away, then as rank 1, in one process."""
    random.seed(77)
    found = []
    for rank, record in enumerate(seat.hear()):
        communicators = _start(seat, rank, record)
        numbers, state = _build(rank, rank + 1)
        communicators.finish_replay(state)
        with pytest.raises(CollectiveAborted, match="not connected yet"):
            dist.barrier()
        communicators.destroy_all()
        assert not dist.is_initialized()
        found.append(numbers)
    return found


def test_a_spare_builds_what_each_rank_built_one_after_the_other() -> None:
    recorded = run_all(record_build, 2)
    assert all(len(record) < 1_000_000 for record, _ in recorded)
    with Cluster(2) as cluster:
        spare = cluster.start(replay_builds, 0)
        spare.say([record for record, _ in recorded])
        replayed = spare.wait("result", START_S)
    for (_, original), copy in zip(recorded, replayed, strict=True):
        assert copy == original


# ---- differences ----


def record_small(seat: Seat) -> bytes:
    communicators = seat.communicators()
    communicators.start_recording()
    communicators.init_process_group(seat.store(1))
    dist.all_reduce(torch.ones(3))
    seat_table = torch.rand(LARGE)
    dist.broadcast(seat_table, 0)
    dist.new_group([0, 1])
    dist.distributed_c10d._get_default_store().set("key", "value")
    dist.distributed_c10d._get_default_store().get("key")
    record = communicators.finish_recording()
    seat.meet("recorded")
    return record


def differ(seat: Seat) -> dict[str, str]:
    record = seat.hear()
    table = torch.zeros(LARGE)

    def same(*, keep: bool = False) -> None:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(table if keep else torch.rand(LARGE), 0)
        dist.new_group([0, 1])
        dist.distributed_c10d._get_default_store().get("key")

    def other_operation() -> None:
        dist.barrier()

    def other_shape() -> None:
        dist.all_reduce(torch.ones(4))

    def further_call() -> None:
        same()
        dist.barrier()

    def further_group() -> None:
        dist.new_group([0, 1])
        dist.new_group([0])

    def further_key() -> None:
        dist.distributed_c10d._get_default_store().get("other")

    def fewer_calls() -> None:
        dist.all_reduce(torch.ones(3))

    cases = {
        "same": same,
        "kept": lambda: same(keep=True),
        "other_operation": other_operation,
        "other_shape": other_shape,
        "further_call": further_call,
        "further_group": further_group,
        "further_key": further_key,
        "fewer_calls": fewer_calls,
    }
    found = {}
    for name, script in cases.items():
        communicators = _start(seat, 0, record)
        try:
            script()
            communicators.finish_replay([])
            found[name] = "none"
        except ReplayMismatch as error:
            found[name] = str(error)
        communicators.destroy_all()
    try:
        seat.communicators(rank=1).start_replay(record)
    except ReplayMismatch as error:
        found["other_rank"] = str(error)
    return found


def test_a_script_that_differs_from_its_record_is_told_where() -> None:
    records = run_all(record_small, 2)
    with Cluster(2) as cluster:
        spare = cluster.start(differ, 0)
        spare.say(records[0])
        found = spare.wait("result", START_S)
    assert found["same"] == "none"
    assert "call 1: its result [20000] is still in use and no restore writes it" in found["kept"]
    assert "group '0', call 0: the script calls barrier" in found["other_operation"]
    assert "the record has allreduce" in found["other_operation"]
    assert "[('float32', [4])], the record has [('float32', [3])]" in found["other_shape"]
    assert "call 2: the script calls barrier [], the record ends after 2 calls" in found["further_call"]
    assert "group '2', which the record does not have" in found["further_group"]
    assert "store.get('0//other') is not in the record" in found["further_key"]
    assert "group '0': 1 recorded calls were not made, first broadcast" in found["fewer_calls"]
    assert "group '1' of the record was not made" in found["fewer_calls"]
    assert "rank 0 of 2, this process is rank 1 of 2" in found["other_rank"]


# ---- served collectives ----


def serve(seat: Seat) -> dict[str, Any]:
    communicators = seat.join()
    group = dist.group.WORLD
    assert group is not None
    communicators.serve_next(group, [torch.arange(3), [torch.full((2,), 9.0)]])
    first, second, third = torch.zeros(3, dtype=torch.int64), torch.zeros(2), torch.ones(1)
    dist.broadcast(first, 0)
    dist.broadcast(second, 0)
    dist.all_reduce(third)  # with peers again
    seat.meet("end")
    return {"served": [first.tolist(), second.tolist()], "live": third.item()}


def test_served_results_stand_in_for_exactly_the_next_collectives() -> None:
    for result in run_all(serve, 2):
        assert result == {"served": [[0, 1, 2], [9.0, 9.0]], "live": 2.0}
