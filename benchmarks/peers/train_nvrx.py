"""nvidia-resiliency-ext 0.7.0, in-process restart: 2 ranks and 1 reserve, survivors keep their process.

CKPT=none|local|local_async|dcp  EVERY=n  TUNED=0|1. Started three times, with RANK, WORLD_SIZE, MASTER_*.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workload as w
from nvidia_resiliency_ext import inprocess
from torch.nn.parallel import DistributedDataParallel

CKPT, EVERY = os.environ.get("CKPT", "local"), int(os.environ.get("EVERY", "1"))
CKPT_DIR = Path(os.environ.get("CKPT_DIR", w.RUN_DIR))
ME = int(os.environ["RANK"])  # the initial rank; a restart may give another one
if CKPT.startswith("local"):
    from nvrx_local import LocalCheckpoints
w.setup_process(ME)

INTERVALS_S = {
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "heartbeat_interval": 0.1,
    "heartbeat_timeout": 5,
    "progress_watchdog_interval": 0.1,
    "last_call_wait": 0.1,
}
TUNING = {name: datetime.timedelta(seconds=value) for name, value in INTERVALS_S.items()}


class DcpCheckpoints:
    """torch.distributed.checkpoint, synchronous; loads in place."""

    def __init__(self, state_of) -> None:
        self._state_of = state_of

    def load(self):
        complete = [int(path.parent.name.removeprefix("step_")) for path in CKPT_DIR.glob("step_*/.metadata")]
        box = [max(complete, default=0)]
        dist.broadcast_object_list(box, 0)
        if box[0]:
            dcp.load(self._state_of(), checkpoint_id=CKPT_DIR / f"step_{box[0]}")
        return box[0], None

    def save(self, state, step: int) -> None:
        dcp.save(state, checkpoint_id=CKPT_DIR / f"step_{step}")
        if dist.get_rank() == 0:
            shutil.rmtree(CKPT_DIR / f"step_{step - 2 * EVERY}", ignore_errors=True)

    def wait(self) -> None:
        """Nothing is under way between steps."""


class Mark(inprocess.finalize.Finalize):
    def __call__(self, state):
        w.emit("mark", ME, name="finalize")
        return state


@inprocess.Wrapper(
    store_kwargs={"host_name": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]) + 1},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(2), inprocess.rank_assignment.ShiftRanks()
    ),
    finalize=Mark(),
    **(TUNING if os.environ.get("TUNED") == "1" else {}),
)
def train(base_store, call: inprocess.CallWrapper = None):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    w.emit("mark", ME, name="fn_enter", iteration=call.iteration, as_rank=rank)
    store = dist.PrefixStore(str(call.iteration), base_store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    w.emit("mark", ME, name="pg")
    model, optimizer = w.build()
    w.prime_optimizer(model, optimizer)
    ddp = DistributedDataParallel(model)
    w.emit("mark", ME, name="built")
    named = dict(model.named_parameters())

    def state_of():
        moments = {
            part: {name: optimizer.state[parameter][part].detach() for name, parameter in named.items()}
            for part in ("exp_avg", "exp_avg_sq", "step")
        }
        return {"model": {name: parameter.detach() for name, parameter in named.items()}, **moments}

    checkpoints = None
    if CKPT == "dcp":
        checkpoints = DcpCheckpoints(state_of)
    elif CKPT != "none":
        checkpoints = LocalCheckpoints(f"{CKPT_DIR}/node{ME}", is_async=CKPT == "local_async")
    step = load(checkpoints, state_of()) if checkpoints else 0
    while step < w.STEPS:
        begun_s = time.time()
        step += 1
        loss = ddp(*w.batch(step - 1, rank))  # data by current rank; the fault by initial rank
        w.maybe_kill(step, ME)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if checkpoints and step % EVERY == 0:
            checkpoints.save(state_of(), step)
        call.ping()
        w.emit("step", ME, step=step, dt=time.time() - begun_s, loss=loss.item(), world=world_size)
    if checkpoints:
        checkpoints.wait()
    w.emit("final", ME, step=step, hash=w.state_digest(model, optimizer))
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def load(checkpoints, live) -> int:
    """Load the newest checkpoint; its step, or 0."""
    step, stored = checkpoints.load()
    if stored is not None:
        for part, tensors in live.items():
            for name, tensor in tensors.items():
                tensor.copy_(stored[part][name])
    if step:
        w.emit("mark", ME, name="loaded", step=step)
    return int(step)


train(
    dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=ME == 0,
        multi_tenant=True,
        wait_for_workers=True,
    )
)
sys.stdout.flush()
os._exit(0)
