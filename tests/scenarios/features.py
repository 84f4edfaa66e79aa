"""A job that uses what a real script uses beside the collectives of DDP: one recorded value per feature.

BatchNorm buffers, an average of the weights, a GradScaler that meets infinities, barriers, object
collectives, a group made inside `train`, checkpoints by torch.distributed.checkpoint, torch.compile, an
orderly end. A step takes 50 ms or more, so that some are committed before the fault and after the recovery.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import deadpool
from deadpool.api import Ft
from deadpool.communicator.nccl_environment import nccl_environment_problems

WIDTH = 32
OVERFLOWS = (3, 9)  # steps whose loss is infinite: the scaler skips them
SAVED = (4, 11)  # steps after which a checkpoint is written and read back


def build(parallel: str) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.BatchNorm1d(2 * WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(2 * WIDTH, WIDTH),
    )
    if parallel == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def save_and_load(model: nn.Module, step: int) -> Tensor:
    """Write a checkpoint through the handles, read it back into zeros, and return what came."""
    folders = [tempfile.mkdtemp(prefix="features-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    assert folders[0] is not None
    save({"model": model.state_dict(), "step": step}, checkpoint_id=folders[0])
    loaded = {
        "model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
        "step": 0,
    }
    load(loaded, checkpoint_id=folders[0])
    assert loaded["step"] == step
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    parts = loaded["model"]
    assert isinstance(parts, dict)
    return flat(getattr(part, "_local_tensor", part) for part in parts.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--compile", default="", metavar="BACKEND")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    deadpool.init()
    assert nccl_environment_problems() == []  # also without a GPU: the agent has set it
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(arguments.parallel)
    torch.manual_seed(100 + rank)
    head = nn.Linear(WIDTH, WIDTH)
    averaged = AveragedModel(
        head,
        multi_avg_fn=get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call] # as is torch's
    )
    # Two of them, since torch's scaler takes no mixture of sharded and plain parameters.
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (model, head)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    compiled: Any = torch.compile(model, backend=arguments.compile) if arguments.compile else model

    def train(ft: Ft) -> None:
        everyone = dist.new_group(range(world_size))
        alone = [dist.new_group([member]) for member in range(world_size)][rank]
        for step in ft.steps(arguments.steps):
            inputs = torch.randn(8, WIDTH)
            loss = F.mse_loss(head(compiled(inputs)), inputs.square())
            scaler.scale(loss * (float("inf") if step in OVERFLOWS else 1.0)).backward()  # type: ignore[no-untyped-call]
            time.sleep(0.05)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            averaged.update_parameters(head)

            dist.barrier()
            dist.monitored_barrier()
            gathered: list[Any] = [None] * world_size
            dist.all_gather_object(gathered, {"rank": rank, "loss": loss.item()})
            in_group = torch.full((1,), float(rank + step))
            dist.all_reduce(in_group, group=everyone)
            dist.all_reduce(in_group, group=alone)

            batch_norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
            ft.record(
                loss=loss,
                batch_norm=flat(batch_norm.buffers()),
                average=flat(averaged.parameters()),
                scale=scaler.get_scale(),
                objects=torch.tensor([each["loss"] for each in gathered], dtype=torch.float64),
                group=in_group,
            )
            if step in SAVED:
                ft.record(checkpoint=save_and_load(model, step))

    deadpool.wrap(train, model=[compiled, head, averaged], optimizer=optimizers, scaler=scaler)()
    dist.destroy_process_group()
    print(f"rank {rank} ended in order", flush=True)


if __name__ == "__main__":
    main()
