"""The job of the scenario tests: a small model with everything that must continue exactly.

Dropout, AdamW, warm-up and cosine learning rate, a seeded sampler, gradient accumulation. A step takes about
50 ms, most of it asleep, as on a host whose device computes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import deadpool
from deadpool.api import Ft
from deadpool.runtime.worker import current_worker

SAMPLES = 96
WIDTH = 64


class Squares(Dataset[tuple[int, Tensor]]):
    """Sample i is drawn from generator i; `noise` comes from the global one, as augmentations often do."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        sample = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return index, sample + self.noise * torch.randn(WIDTH) if self.noise else sample


class Shuffled(Sampler[int]):
    """Endless passes, each shuffled anew and dealt out to the ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        per_pass = SAMPLES // self.world_size
        while True:
            number, begin = divmod(self.position, per_pass)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(number))
            for index in order[self.rank :: self.world_size][begin:per_pass].tolist():
                self.position += 1
                yield index

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def build(parallel: str) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    )
    if parallel == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def hold_gil_for(seconds: float) -> None:
    """As a C extension does that never lets other threads run."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))  # unlike CDLL, PyDLL keeps the GIL


def collect_garbage_for(seconds: float) -> None:
    """One collection that takes this long, as with hundreds of millions of objects."""

    def take_long(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            hold_gil_for(seconds)

    gc.callbacks.append(take_long)
    gc.collect()
    gc.callbacks.remove(take_long)


def fail_if_broken(first_rehearsal: str, first_promotion: str) -> None:
    """Fail on the host that rehearses first, or on whichever spare is promoted first; both leave a file."""
    worker = current_worker()
    if worker is None or worker.assignment is None:
        return
    assignment = worker.assignment
    if first_rehearsal and assignment.rehearse:
        with contextlib.suppress(FileExistsError), open(first_rehearsal, "x") as file:
            file.write(assignment.member)
        if Path(first_rehearsal).read_text() == assignment.member:
            raise FileNotFoundError("the mount that only this host lacks")
    if first_promotion and assignment.record and not assignment.rehearse:
        with contextlib.suppress(FileExistsError):
            Path(first_promotion).touch(exist_ok=False)
            raise FileNotFoundError("the mount that only this host lacks")


def hold(ft: Ft, holds: Path | None, step: int) -> None:
    """Let a test decide when training goes on: it waits here while there is a file of this step."""
    if holds is not None and (holds / f"step-{step}").exists():
        with ft.quiet():
            while (holds / f"step-{step}").exists():
                time.sleep(0.05)


def make_groups(rank: int) -> list[dist.ProcessGroup]:
    """The tensor and the data group of a rank, of two by two."""
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return [made[rank // 2], made[2 + rank % 2]]


def tell_ids(group: dist.ProcessGroup, rank: int) -> Tensor:
    """Logical ids of the members, in the order of the group; checked, and recorded by the caller."""
    ids = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    dist.all_gather(ids, torch.tensor([rank]), group=group)
    assert [int(each) for each in ids] == dist.get_process_group_ranks(group)
    return torch.cat(ids)


def sum_in_order(group: dist.ProcessGroup, rank: int, step: int) -> Tensor:
    """A product with the place in the group: exchanged members would change it."""
    value = torch.tensor([math.sqrt(2 + rank) * (1 + dist.get_rank(group)) / step])
    dist.all_reduce(value, group=group)
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--api", choices=("wrap", "wrap_step"), default="wrap")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--raise-at", type=int, default=0, help="rank 1 raises ValueError at this step")
    parser.add_argument("--spin-at", type=int, default=0, help="rank 1 computes for ever in this step, once")
    parser.add_argument("--lone-call-at", type=int, default=0, help="rank 1 alone calls barrier() then")
    parser.add_argument(
        "--quiet-at", type=int, default=0, help="rank 1 writes a file for 8 s after this step"
    )
    parser.add_argument(
        "--hold-gil-at", type=int, default=0, help="rank 1 holds the GIL for 15 s after this step"
    )
    parser.add_argument(
        "--collect-at", type=int, default=0, help="rank 1 collects garbage for 3 s in this step"
    )
    parser.add_argument("--grow-at", type=int, default=0, help="rank 1 has a larger buffer after this step")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--noise", type=float, default=0.0, help="added to each sample")
    parser.add_argument(
        "--holds", type=Path, help="folder; rank-R in it: R does not start, step-S: none begins S"
    )
    parser.add_argument("--groups", action="store_true", help="two by two ranks, each in two subgroups")
    parser.add_argument("--fail-first-rehearsal", default="", help="the script fails there; makes this file")
    parser.add_argument("--fail-first-promotion", default="", help="the script fails once; makes this file")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    deadpool.init()
    fail_if_broken(arguments.fail_first_rehearsal, arguments.fail_first_promotion)
    rank = torch.distributed.get_rank()
    while arguments.holds and (arguments.holds / f"rank-{rank}").exists():
        time.sleep(0.05)
    groups = make_groups(rank) if arguments.groups else []
    model = build(arguments.parallel)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * step / arguments.steps)),
    )
    loader = StatefulDataLoader(
        Squares(arguments.noise),
        batch_size=4,
        sampler=Shuffled(rank, torch.distributed.get_world_size()),
        num_workers=arguments.num_workers,
    )

    seen = nn.Module()  # beside the model, so that nothing sends it to other ranks
    seen.register_buffer("buffer", torch.zeros(4))

    def train(ft: Ft) -> None:
        batches = iter(loader)
        for step in ft.steps(arguments.steps):
            if step == arguments.raise_at and ft.rank == 1:
                raise ValueError(f"a bug of the user at step {step}")
            hold(ft, arguments.holds, step)
            while step == arguments.spin_at and ft.rank == 1 and ft.generation == 1:
                pass
            if step == arguments.collect_at and ft.rank == 1:
                collect_garbage_for(3.0)
            for _ in range(arguments.accumulate):
                indices, inputs = next(batches)
                loss = F.mse_loss(model(inputs), inputs.square()) / arguments.accumulate
                loss.backward()
                ft.record(loss=loss, samples=indices)
            for group in groups:
                ft.record(members=tell_ids(group, ft.rank), sum=sum_in_order(group, ft.rank, step))
            time.sleep(arguments.step_s)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ft.record(lr=scheduler.get_last_lr()[0])
            if step == arguments.grow_at and ft.rank == 1:
                seen.buffer = torch.zeros(8)
            if step == arguments.lone_call_at and ft.rank == 1:
                torch.distributed.barrier()
            if step == arguments.quiet_at and ft.rank == 1:
                with ft.quiet():
                    time.sleep(8.0)
            if step == arguments.hold_gil_at and ft.rank == 1:
                with ft.quiet():
                    hold_gil_for(15.0)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    if arguments.grow_at:
        state["seen"] = seen
    if arguments.api == "wrap":
        deadpool.wrap(train, **state)()
        return

    def step(batch: tuple[Tensor, Tensor]) -> None:
        loss = F.mse_loss(model(batch[1]), batch[1].square())
        loss.backward()  # type: ignore[no-untyped-call] # untyped in torch 2.13
        time.sleep(arguments.step_s)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    calls = 0
    with deadpool.wrap_step(step, **state) as train_step:
        for _ in range(arguments.steps):
            train_step()
            calls += 1
    assert calls == arguments.steps


if __name__ == "__main__":
    main()
