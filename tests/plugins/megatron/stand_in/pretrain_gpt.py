"""What Megatron-LM's pretrain_gpt.py is to the stand-in for its training.py."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[4]))

from examples import megatron_gpt as gpt

pretrain_args: dict[str, Any] = {
    "iteration": 0,
    "consumed_train_samples": 0,
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
    "num_floating_point_operations_so_far": 0.0,
}


class Text(Dataset[torch.Tensor]):
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.text = gpt.Windows(0, 1).text

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + index)
        start = int(torch.randint(len(self.text) - gpt.CONTEXT - 1, (1,), generator=generator))
        return self.text[start : start + gpt.CONTEXT + 1].long()


def datasets(sizes: Any, vp_stage: int | None = None) -> Any:
    return Text(1), Text(100_000), Text(200_000)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in {
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "train-iters": 12,
        "eval-interval": 4,
        "save-interval": 5,
        "log-interval": 3,
        "exit-interval": 0,
        "rampup-samples": 80,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--optimizer", default="distributed")
    parser.add_argument("--rerun-mode", default="disabled")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    vars(args).update(pretrain_args, steps=args.train_iters, gloo_groups=True)
    return args


if __name__ == "__main__":
    from deadpool.plugins import megatron
    from tests.plugins.megatron.stand_in.training import pretrain, set_global_variables

    pretrain = megatron.wrap_pretrain(pretrain)  # the one changed line

    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    set_global_variables(parse_args())
    pretrain(datasets, gpt.forward_step)
