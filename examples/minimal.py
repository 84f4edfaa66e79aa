"""The smallest protected loop: deadpool run --standalone --nnodes 2 --spares 1 examples/minimal.py."""

import torch
from torch.nn.parallel import DistributedDataParallel

import deadpool

deadpool.init()  # instead of init_process_group
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)


def train(ft):  # may be entered again after a failure
    for step in ft.steps(100):
        generator = torch.Generator().manual_seed(1000 * step + ft.rank)
        inputs = torch.randn(32, 16, generator=generator)  # data that is a function of the step
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ft.record(loss=loss)
        if ft.rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


deadpool.wrap(train, model=model, optimizer=optimizer)()
