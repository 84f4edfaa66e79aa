"""Plain DDP, or DDP with torch.distributed.checkpoint. Launched by torchrun or ft_launcher.

CKPT=none|sync|async  EVERY=n  CKPT_DIR=...  FT_CLIENT=1: heartbeats to ft_launcher
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workload as w

CKPT, EVERY = os.environ.get("CKPT", "none"), int(os.environ.get("EVERY", "1"))
CKPT_DIR = Path(os.environ.get("CKPT_DIR", w.RUN_DIR))
RANK = int(os.environ["RANK"])
KEPT = 2  # complete checkpoints
if os.environ.get("FT_CLIENT") == "1":
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
else:
    RankMonitorClient = None
w.setup_process(RANK)


def complete_checkpoints() -> list[int]:
    """Steps whose checkpoint is complete: DCP writes .metadata last."""
    found = (path.parent.name for path in CKPT_DIR.glob("step_*/.metadata"))
    return sorted(int(name.removeprefix("step_")) for name in found)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    named = dict(model.named_parameters())
    moments = {
        part: {name: optimizer.state[parameter][part] for name, parameter in named.items()}
        for part in ("exp_avg", "exp_avg_sq", "step")
    }
    return {"model": model.state_dict(), **moments}


class Checkpointer:
    """Saves every EVERY steps, and forgets the older ones."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._group = dist.new_group(backend="gloo") if CKPT == "async" else None
        self._saving = None

    def load(self) -> int:
        """Load the newest complete one in place; its step, or 0."""
        box = [max(complete_checkpoints(), default=0)]
        dist.broadcast_object_list(box, 0)
        if box[0]:
            dcp.load(state_of(self._model, self._optimizer), checkpoint_id=CKPT_DIR / f"step_{box[0]}")
            w.emit("mark", RANK, name="loaded", step=box[0])
        return box[0]

    def save(self, step: int) -> None:
        self.wait()
        target = CKPT_DIR / f"step_{step}"
        state = state_of(self._model, self._optimizer)
        if CKPT == "sync":
            dcp.save(state, checkpoint_id=target)
        else:
            self._saving = dcp.async_save(state, checkpoint_id=target, process_group=self._group)
        if RANK == 0:
            for old in complete_checkpoints()[:-KEPT]:
                shutil.rmtree(CKPT_DIR / f"step_{old}", ignore_errors=True)

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result()


def main() -> None:
    client = RankMonitorClient() if RankMonitorClient else None
    if client:
        client.init_workload_monitoring()
    model, optimizer, ddp = w.start_ddp(RANK)
    checkpointer = None if CKPT == "none" else Checkpointer(model, optimizer)
    step = checkpointer.load() if checkpointer else 0
    while step < w.STEPS:
        begun_s = time.time()
        step += 1
        loss = w.forward_backward(ddp, step, RANK)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if checkpointer and step % EVERY == 0:
            checkpointer.save(step)
        if client:
            client.send_heartbeat()
        w.emit(
            "step", RANK, step=step, dt=time.time() - begun_s, loss=loss.item(), world=dist.get_world_size()
        )
    if checkpointer:
        checkpointer.wait()
    w.emit("final", RANK, step=step, hash=w.state_digest(model, optimizer))
    if client:
        client.shutdown_workload_monitoring()
    dist.barrier()
    dist.destroy_process_group()


main()
