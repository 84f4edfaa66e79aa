"""torchft: one replica group of one rank, launched by a torchrun of its own.

REPLICA=i  MODE=dynamic|spare (spare: FIXED_WITH_SPARES with two contributing replicas of three)
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta

import workload as w
from torchft import Manager, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel
from torchft.manager import WorldSizeMode
from torchft.optim import OptimizerWrapper

REPLICA = int(os.environ["REPLICA"])
HAS_SPARE = os.environ.get("MODE") == "spare"
w.setup_process(REPLICA)
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")


def main() -> None:
    model, optimizer = w.build()
    w.prime_optimizer(model, optimizer)

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        w.emit("mark", REPLICA, name="loaded")

    def state_dict():
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=2 if HAS_SPARE else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if HAS_SPARE else WorldSizeMode.DYNAMIC,
        init_sync=False,
        replica_id=f"replica_{REPLICA}",
        timeout=timedelta(seconds=30),
    )
    w.emit("mark", REPLICA, name="pg")
    ddp = DistributedDataParallel(manager, model)
    managed = OptimizerWrapper(manager, optimizer)
    done = os.path.join(w.RUN_DIR, "done")
    while manager.current_step() < w.STEPS and not os.path.exists(done):
        begun_s = time.time()
        managed.zero_grad()  # starts the quorum, too
        shard = REPLICA
        if HAS_SPARE:
            manager.wait_quorum()  # the data shard is chosen by participating rank
            shard = manager.participating_rank() or 0
        step = manager.current_step() + 1
        loss = ddp(*w.batch(step - 1, shard))
        w.maybe_kill(step, REPLICA)
        loss.backward()
        healing = manager._healing
        if not manager.should_commit():  # this and the step are all that OptimizerWrapper.step() does
            w.emit("mark", REPLICA, name="not_committed", step=step, dt=time.time() - begun_s)
            continue
        optimizer.step()
        w.emit(
            "step",
            REPLICA,
            step=manager.current_step(),
            dt=time.time() - begun_s,
            loss=loss.item(),
            world=manager.num_participants(),
            part=manager.is_participating(),
            healed=healing,
        )
    w.emit("final", REPLICA, step=manager.current_step(), hash=w.state_digest(model, optimizer))
    with open(done, "w"):
        pass
    time.sleep(0.5)
    manager.shutdown(wait=False)
    sys.stdout.flush()
    os._exit(0)


main()
