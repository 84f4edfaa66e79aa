"""Lazy optimizer state, created before the first step so that the set of buffers is closed.

[Note: created state changes no bit]
Most optimizers fill `state[p]` with zeros on the first step in which `p` has a gradient, inside their own
`_init_group`. Calling that method early, with a stand-in gradient, leaves exactly what the first step would
have made. SGD is different: its first step sets the momentum buffer to the gradient itself. A buffer of
-0.0 reproduces that, because momentum * -0.0 + g is g for every g, also for g = -0.0 (with +0.0 it is not),
as long as dampening is 0. With dampening the first step differs from all others, so it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import optim

# Optimizers whose `_init_group` makes, and whose step only updates in place, state that starts at zero.
_LAZY = (
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
)
_SUPPORTED_NAMES = "Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, RMSprop, SGD"


def create_missing_state(name: str, optimizer: optim.Optimizer) -> list[str]:
    """Create the state that the first step would create.

    Args:
        name: how to call the optimizer in messages.
        optimizer: changed in place; parameters that have state keep it.

    Returns:
        The reasons why this optimizer cannot be protected; empty when it can.
    """
    missing = list(_params_without_state(optimizer))
    if not missing:
        return []
    if _has_method_of(optimizer, optim.SGD, "step"):
        return _create_momentum(name, optimizer)
    if any(_has_method_of(optimizer, kind, "_init_group") for kind in _LAZY):
        for group, param in missing:
            _run_init_group(optimizer, group, param)
        return []
    return [
        f"{name}: a {type(optimizer).__qualname__} without state for {len(missing)} of its parameters; what "
        f"its first step creates is unknown. Use one of {_SUPPORTED_NAMES}, or run its first step before "
        "wrap, so that every parameter has its state"
    ]


def _params_without_state(optimizer: optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and not optimizer.state.get(param):
                yield group, param


def _has_method_of(optimizer: optim.Optimizer, kind: type[optim.Optimizer], method: str) -> bool:
    """Whether `optimizer` still uses `kind`'s own method (a subclass may change what it keeps)."""
    if not isinstance(optimizer, kind):
        return False
    own = inspect.unwrap(getattr(type(optimizer), method))
    return own is inspect.unwrap(getattr(kind, method))


def _run_init_group(optimizer: optim.Optimizer, group: dict[str, Any], param: torch.Tensor) -> None:
    init_group = optimizer._init_group  # type: ignore[attr-defined]
    outputs: list[list[Any]] = [[] for _ in list(inspect.signature(init_group).parameters)[1:]]
    gradient = param.grad
    # Only its presence is looked at: an alias costs no memory.
    param.grad = param.detach()
    try:
        with torch.no_grad():
            init_group({**group, "params": [param]}, *outputs)
    finally:
        param.grad = gradient


def _create_momentum(name: str, optimizer: optim.Optimizer) -> list[str]:
    problems: list[str] = []
    for index, group in enumerate(optimizer.param_groups):
        if group["momentum"] == 0:
            continue
        if group["dampening"] != 0:
            problems.append(
                f"{name}: SGD with dampening={group['dampening']} in parameter group {index}; its first step "
                "differs from all others and cannot be prepared. Use dampening=0, or run one step before wrap"
            )
            continue
        for param in group["params"]:
            if param.requires_grad and optimizer.state[param].get("momentum_buffer") is None:
                buffer = torch.zeros_like(param, memory_format=torch.preserve_format)
                optimizer.state[param]["momentum_buffer"] = buffer.detach().neg_()
    return problems
