"""Optimizer state created before the first step changes no bit, and closes the set of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import nn, optim

from deadpool.errors import ConfigError
from deadpool.snapshot.optimizer_state import create_missing_state
from deadpool.snapshot.stateful import collect
from tests.unit.snapshot.support import bits

Factory = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

FACTORIES: dict[str, Factory] = {
    "Adam": partial(optim.Adam, lr=0.1),
    "Adam amsgrad foreach": partial(optim.Adam, lr=0.1, amsgrad=True, foreach=True),
    "Adam fused": partial(optim.Adam, lr=0.1, fused=True),
    "AdamW": partial(optim.AdamW, lr=0.1),
    "AdamW maximize": partial(optim.AdamW, lr=0.1, maximize=True),
    "NAdam": partial(optim.NAdam, lr=0.1),
    "RAdam": partial(optim.RAdam, lr=0.1, weight_decay=0.1),
    "Adamax": partial(optim.Adamax, lr=0.1),
    "Adadelta": partial(optim.Adadelta),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "RMSprop": partial(optim.RMSprop, lr=0.1),
    "RMSprop centered momentum": partial(optim.RMSprop, lr=0.1, centered=True, momentum=0.9),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "SGD nesterov foreach": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD momentum fused": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
}


def run(name: str, *, created: bool) -> list[str]:
    """Four steps; gradients hold +0.0, -0.0 and tiny numbers, one parameter gets none until the third."""
    # torch's fused SGD itself cannot take a parameter that joins late.
    first_of_late = 0 if "SGD momentum fused" in name else 2
    torch.manual_seed(7)
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(2))]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = FACTORIES[name]([*params, frozen])
    had_state = bool(optimizer.state.get(frozen))
    if created:
        assert create_missing_state("optimizer", optimizer) == []
        assert all(param.grad is None for param in params)
        assert bool(optimizer.state.get(frozen)) == had_state
    for step in range(4):
        for index, param in enumerate(params):
            param.grad = torch.randn(param.shape) if index != 1 or step >= first_of_late else None
        assert params[0].grad is not None and params[2].grad is not None
        params[0].grad[0] = torch.tensor([-0.0, 0.0, 1e-42])
        params[2].grad.fill_(-0.0)
        optimizer.step()
    held = [value for param in params for value in optimizer.state[param].values()]
    # Not compared: a count for the parameter without gradients exists early only with created state.
    return [bits(value) for value in [*params, *(item for item in held if isinstance(item, torch.Tensor))]]


@pytest.mark.parametrize("name", FACTORIES)
def test_created_state_changes_no_bit(name: str) -> None:
    assert run(name, created=True) == run(name, created=False)


@pytest.mark.parametrize("name", FACTORIES)
def test_the_set_of_state_tensors_is_closed_before_the_first_step(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = FACTORIES[name](model.parameters())
    before = collect({"model": model, "optimizer": optimizer})
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    after = collect({"model": model, "optimizer": optimizer})
    assert [item.name for item in after.tensors] == [item.name for item in before.tensors]
    assert [item.resolve().data_ptr() for item in after.tensors] == [
        item.resolve().data_ptr() for item in before.tensors
    ]


def test_dampening_is_refused_by_name_unless_the_state_exists() -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ConfigError, match=r"optimizer: SGD with dampening=0.5 .*run one step before wrap"):
        collect({"model": model, "optimizer": optimizer})
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state = collect({"model": model, "optimizer": optimizer})
    assert "optimizer.state.model.weight.momentum_buffer" in [item.name for item in state.tensors]


def test_an_optimizer_with_unknown_lazy_state_is_refused_by_name() -> None:
    class Rectified(optim.Adam):
        def _init_group(self, *arguments: object) -> bool:
            return True

    model = nn.Linear(3, 2)
    for optimizer in (optim.Rprop(model.parameters()), Rectified(model.parameters())):
        with pytest.raises(
            ConfigError, match=rf"optimizer: a .*{type(optimizer).__name__} without state for 2"
        ):
            collect({"model": model, "optimizer": optimizer})


def test_state_that_is_neither_tensor_nor_number_is_refused_by_name() -> None:
    model = nn.Linear(3, 2, bias=False)  # LBFGS keeps all its state, lists among it, with the first parameter
    optimizer = optim.LBFGS(model.parameters(), max_iter=1)

    def loss() -> float:
        optimizer.zero_grad()
        value = model(torch.ones(2, 3)).pow(2).sum()
        value.backward()
        return float(value.detach())

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=r"optimizer\.state\.model\.weight\.old_dirs: .* type list"):
        collect({"model": model, "optimizer": optimizer})
