"""The manager that lm-resiliency leaves to its user: lmres_manager.py STORE_FILE RUN_ID.

It holds the rendezvous store, notices a dead worker, selects the checkpoint that survivors flushed, and
publishes the successor generation with the standby in the place of the dead node.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import workload as w
from lm_resiliency.integrations.torchrun import TorchrunRecoveryCoordinator, TorchrunRecoveryRequest
from torch.distributed import FileStore

STORE_FILE, RUN_ID = sys.argv[1:]
POLL_S = 0.02
WORLD_SIZE = 2


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def newest_complete_step(folder: Path) -> int | None:
    """The newest step with a shard of every rank."""
    complete = [
        int(found[1])
        for path in folder.glob("step-*")
        if (found := re.search(r"step-(\d+)$", path.name))
        and all((path / f"rank-{rank}.pt").exists() for rank in range(WORLD_SIZE))
    ]
    return max(complete, default=None)


def wait_for_death(coordinator: Any, generation: int, workers: list[dict[str, Any]]) -> int | None:
    """The rank of a worker that died before it was done; None once all are done."""

    def is_done(rank: int) -> bool:
        return os.path.exists(os.path.join(w.RUN_DIR, f"done-g{generation}-r{rank}"))

    while True:
        time.sleep(POLL_S)
        coordinator.check_health()
        gone = [worker["rank"] for worker in workers if not is_alive(worker["pid"])]
        for rank in gone:
            if not is_done(rank):
                return int(rank)
        if len(gone) == WORLD_SIZE:
            return None


def main() -> None:
    coordinator = TorchrunRecoveryCoordinator(FileStore(STORE_FILE), run_id=RUN_ID)
    placement = None
    while placement is None:
        time.sleep(POLL_S)
        placement = coordinator.initial_placement(
            active_node_count=WORLD_SIZE, allocated_node_count=WORLD_SIZE + 1
        )
    active, standby = list(placement.active_node_ids), list(placement.standby_node_ids)
    quarantined: list[str] = []
    generation = 0
    while True:
        files = [Path(w.RUN_DIR) / f"worker-g{generation}-r{rank}.json" for rank in range(WORLD_SIZE)]
        while not all(file.exists() for file in files):
            time.sleep(POLL_S)
        workers = [json.loads(file.read_text()) for file in files]
        dead = wait_for_death(coordinator, generation, workers)
        if dead is None:
            break
        w.emit("mark", name="mgr_detect", dead=dead)
        while any(is_alive(worker["pid"]) for worker in workers):  # survivors flush on their way out
            time.sleep(POLL_S)
        step = newest_complete_step(Path(workers[0]["folder"]))
        w.emit("mark", name="mgr_flushed", step=step)
        if step is None:
            coordinator.close()
            raise SystemExit("no complete checkpoint")
        successor = coordinator.publish_successor(
            generation=generation,
            active_node_ids=active,
            quarantined_node_ids=quarantined,
            request=TorchrunRecoveryRequest(
                plan_id=uuid.uuid4().hex,
                intent_id=uuid.uuid4().hex,
                reason_code="worker_killed",
                recovery_mode="latest",
                checkpoint_source="gemini",
                checkpoint_step=step,
                checkpoint_manifest_id=f"step-{step}",
                topology_digest=workers[0]["topology"],
                restart_deadline_unix_ms=int((time.time() + 60) * 1000),
            ),
            local_world_size=1,
            replacement=(dead, standby.pop(0)) if standby else None,
        )
        active, quarantined = list(successor.active_node_ids), list(successor.quarantined_node_ids)
        generation = successor.generation
        w.emit("mark", name="mgr_publish", step=step)
    coordinator.close()
    while True:  # the store must outlive the agents; run.py ends this process
        time.sleep(1)


main()
