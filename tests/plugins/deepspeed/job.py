"""A DeepSpeed loop that counts what must not double, saves checkpoints, and loads them at the end.

It joins the job by DeepSpeed's own init_distributed, as a script does that knows nothing of DeadPool.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import deadpool
from deadpool.api import Ft
from deadpool.plugins import deepspeed
from deadpool.runtime.session import session
from deadpool.snapshot.codec import tensor_bytes
from examples.deepspeed_gpt import Block, Embedding, Head, Windows, loss_of

SAVED = (3, 10)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def hooks_of(engine: Any) -> int:
    """Hooks of all modules, and of the optimizer that DeepSpeed drives."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    base = engine.basic_optimizer
    steps = len(base._optimizer_step_pre_hooks) + len(base._optimizer_step_post_hooks)
    return steps + sum(len(getattr(module, table)) for module in engine.modules() for table in tables)


def groups_of(engine: Any) -> list[Any]:
    """Every group that engine and optimizer keep; by identity."""
    holders = [engine, engine.optimizer, *engine.module.parameters()]
    values = [value for holder in holders for value in vars(holder).values()]
    values += [item for value in values if isinstance(value, list) for item in value]
    return [value for value in values if isinstance(value, torch.distributed.ProcessGroup)]


def moved(now: list[Any], then: list[Any]) -> int:
    """Groups that are another object than before."""
    return sum(a is not b for a, b in zip(now, then, strict=True))


def stale_handles() -> int:
    """Handles whose communicator is of an older generation."""
    joined = session()
    assert joined is not None
    return sum(handle.generation != joined.generation for handle in joined.communicators.handles())


def digest_of(engine: Any) -> str:
    """Hash of this rank's partitions and their moments."""
    found = hashlib.sha256()
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
    masters = next(getattr(engine.optimizer, name) for name in names if hasattr(engine.optimizer, name))
    for master in masters:
        state = engine.basic_optimizer.state[master]
        for tensor in (master, state["exp_avg"], state["exp_avg_sq"]):
            found.update(tensor_bytes(tensor))
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    config = json.loads((Path(deadpool.__file__).parents[1] / "examples" / "deepspeed_gpt.json").read_text())
    config["zero_optimization"]["stage"] = arguments.stage
    config["deadpool"] = {}
    torch.manual_seed(1)
    model = nn.Sequential(Embedding(), Block(), Head())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    windows = Windows(2, rank)
    hooks: list[int] = []
    groups: list[list[Any]] = []

    def digest_file(step: int) -> Path:
        return Path(arguments.folder) / f"digest-{step}-{rank}.txt"

    def train(ft: Ft) -> None:
        hooks.append(hooks_of(engine))
        groups.append(groups_of(engine))
        batches = iter(windows)
        for step in ft.steps(arguments.steps):
            text, targets = next(batches)
            loss = loss_of(engine(text), targets)
            engine.backward(loss)
            engine.step()
            ft.record(
                loss=loss,
                more_hooks=float(hooks_of(engine) - hooks[0]),
                schedule=float(engine.lr_scheduler.last_batch_iteration),
                steps=float(engine.global_steps),
                micro_steps=float(engine.micro_steps),
                samples=float(engine.global_samples),
                stale_handles=float(stale_handles()),
                moved_groups=float(
                    sum(a is not b for a, b in zip(groups_of(engine), groups[0], strict=True))
                ),
            )
            if step in SAVED:
                ft.check()
                engine.save_checkpoint(str(arguments.folder), tag=f"step{step}")
                digest_file(step).write_text(digest_of(engine))
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
            with (arguments.folder / f"memory-{rank}.jsonl").open("a") as file:
                line = {"pid": os.getpid(), "generation": ft.generation, "step": step, "bytes": resident}
                file.write(json.dumps(line) + "\n")

    deadpool.wrap(train, engine=engine, data=windows)()

    for step in SAVED:
        path, _ = engine.load_checkpoint(str(arguments.folder), tag=f"step{step}")
        assert path is not None
        assert digest_of(engine) == digest_file(step).read_text(), f"the checkpoint of step {step} differs"
        assert engine.global_steps == step


if __name__ == "__main__":
    main()
