"""A job whose ranks call different collectives in step 3: rank 1 asks once more for what rank 0 remembers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import deadpool
from deadpool.api import Ft


def main() -> None:
    torch.set_num_threads(1)
    deadpool.init()
    pair = dist.new_group([0, 1], group_desc="REMEMBERED_ANSWERS")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(ft: Ft) -> None:
        for step in ft.steps(6):
            if ft.rank == 1 and step == 3:
                answers = [torch.zeros(4) for _ in range(2)]
                dist.all_gather(answers, torch.ones(4), group=pair)
            model(torch.ones(1, 2)).sum().backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()

    deadpool.wrap(train, model=model, optimizer=optimizer)()


if __name__ == "__main__":
    main()
