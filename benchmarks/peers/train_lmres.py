"""lm-resiliency 0.2.0: DDP with its in-memory checkpoints and peer replication, every EVERY steps.

CKPT_DIR is the shared folder (here on tmpfs) into which survivors flush their memory when they die. Its
detection is off: that needs NCCL. Launched by torchrun with the lm_resiliency rendezvous (2 active agents, 1
standby, lmres_manager.py), or by plain torchrun.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import workload as w
from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.integrations.pytorch import enable_resiliency
from lm_resiliency.integrations.torchrun import get_torchrun_worker_context

EVERY = int(os.environ.get("EVERY", "1"))
RANK = int(os.environ["RANK"])
w.setup_process(RANK)
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")


def main() -> None:
    model, optimizer, ddp = w.start_ddp(RANK)
    is_managed = "LM_RESILIENCY_TORCHRUN_RUN_ID" in os.environ
    context = get_torchrun_worker_context() if is_managed else None
    recovery = {}
    if context is not None and context.checkpoint_step is not None:  # as their own harness passes it
        recovery = {
            "recovery_mode": context.recovery_mode,
            "_recovery_step": context.checkpoint_step,
            "_expected_topology_id": context.topology_digest,
        }
    handle = enable_resiliency(
        ddp,
        optimizer,
        interval=EVERY,
        enable_detection=False,
        device=torch.device("cpu"),
        group=dist.new_group(backend="gloo"),  # the default makes NCCL groups
        checkpoint=InMemoryCkptConfig(
            replication_jump=1,
            disk_flush_interval=0,
            disk_folder=os.environ["CKPT_DIR"],
            pin_memory=False,
            verify_integrity=False,
        ),
        **recovery,
    )
    if handle.recovered_step > 0:
        w.emit("mark", RANK, name="loaded", step=handle.recovered_step)
    generation = context.generation if context else 0
    introduce(handle, Path(w.RUN_DIR) / f"worker-g{generation}-r{RANK}.json")
    while handle.step_count < w.STEPS:
        begun_s = time.time()
        step = handle.step_count + 1
        loss = w.forward_backward(ddp, step, RANK)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # the checkpoint is taken in an optimizer post-step hook
        w.emit(
            "step", RANK, step=step, dt=time.time() - begun_s, loss=loss.item(), world=dist.get_world_size()
        )
    w.emit("final", RANK, step=handle.step_count, hash=w.state_digest(model, optimizer))
    (Path(w.RUN_DIR) / f"done-g{generation}-r{RANK}").touch()
    handle.close()
    dist.barrier()
    dist.destroy_process_group()


def introduce(handle, path: Path) -> None:
    """Tell the manager who this worker is."""
    manager = handle.ckpt_manager
    folder = str(manager._disk._folder)
    facts = {"pid": os.getpid(), "rank": RANK, "topology": manager.topology_id, "folder": folder}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


main()
