"""The workload under `deadpool run`; started by torchrun instead, the same script is its plain counterpart.

PARALLEL=ddp|fsdp2
COMPUTE_S=s: the compute of a step is replaced by a sleep of s seconds: a device at work, the host idle. The
exchange of gradients becomes one of a single number, which keeps the ranks in step.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import workload as w
from torch.nn.parallel import DistributedDataParallel

import deadpool
from deadpool.api import Ft

PARALLEL = os.environ.get("PARALLEL", "ddp")
COMPUTE_S = float(os.environ.get("COMPUTE_S", "0"))


class DeviceAdamW(torch.optim.AdamW):
    """An update by a device: on the host it is one number, by which the digest tells steps apart."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.param_groups[0]["params"][-1].add_(1.0)


def device_step(step: int, rank: int) -> torch.Tensor:
    """One step of a device that the host only waits for."""
    time.sleep(COMPUTE_S)
    w.maybe_kill(step, rank)
    loss = torch.ones(1)
    dist.all_reduce(loss)
    return loss


def main() -> None:
    deadpool.init()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    w.setup_process(rank)
    w.emit("mark", rank, name="pg")
    model, optimizer = w.build(DeviceAdamW if COMPUTE_S else torch.optim.AdamW, shard=PARALLEL == "fsdp2")
    w.prime_optimizer(model, optimizer)
    trained = DistributedDataParallel(model) if PARALLEL == "ddp" else model
    w.emit("mark", rank, name="built")

    def train(ft: Ft) -> None:
        w.emit("mark", rank, name="fn_enter", step=ft.step)
        for step in ft.steps(w.STEPS):
            begun_s = time.time()
            loss = device_step(step, rank) if COMPUTE_S else w.forward_backward(trained, step, rank)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            w.emit("step", rank, step=step, dt=time.time() - begun_s, loss=loss.item(), world=world_size)
        w.emit("final", rank, step=ft.step, hash=w.state_digest(model, optimizer))

    deadpool.wrap(train, model=trained, optimizer=optimizer)()


main()
