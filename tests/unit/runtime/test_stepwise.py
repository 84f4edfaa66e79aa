"""`wrap_step` in a script that was not started by `deadpool run`: it stands aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deadpool.errors import ConfigError
from deadpool.runtime.state import StateKeeper
from deadpool.runtime.stepwise import StepRunner


class Loader:
    """Two batches an epoch, and an epoch that can be counted."""

    def __init__(self) -> None:
        self.n_epochs = 0

    def __iter__(self) -> Any:
        self.n_epochs += 1
        epoch = self.n_epochs
        return iter([f"epoch {epoch} batch 0", f"epoch {epoch} batch 1"])


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 2)


@pytest.fixture
def optimizer(model: nn.Linear) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def state(model: nn.Linear, optimizer: torch.optim.SGD) -> StateKeeper:
    return StateKeeper({"model": model, "optimizer": optimizer})


def test_a_call_is_the_call_of_the_step_with_all_its_arguments(state: StateKeeper) -> None:
    calls: list[tuple[Any, ...]] = []

    def step(first: int, second: int = 0, *, scale: int) -> int:
        calls.append((first, second, scale))
        return first * scale

    runner = StepRunner(step, None, state, None)
    assert runner(2, scale=5) == 10
    assert runner(3, 4, scale=1) == 3
    assert calls == [(2, 0, 5), (3, 4, 1)]


def test_training_through_the_runner_is_the_training_without_it(
    model: nn.Linear, optimizer: torch.optim.SGD, state: StateKeeper
) -> None:
    plain = nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = [torch.full((3, 4), float(i + 1)) for i in range(4)]

    def train(of: nn.Linear, by: torch.optim.SGD, batch: torch.Tensor) -> float:
        by.zero_grad()
        loss = of(batch).square().mean()
        loss.backward()
        by.step()
        return float(loss.detach())

    runner = StepRunner(lambda batch: train(model, optimizer, batch), None, state, None)
    assert [runner(batch) for batch in inputs] == [train(plain, plain_optimizer, each) for each in inputs]
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_the_loader_gives_the_first_argument_epoch_after_epoch(state: StateKeeper) -> None:
    loader = Loader()
    runner = StepRunner(lambda batch, extra: (batch, extra), None, state, loader)
    seen = [runner(number) for number in range(5)]
    assert seen == [
        ("epoch 1 batch 0", 0),
        ("epoch 1 batch 1", 1),
        ("epoch 2 batch 0", 2),
        ("epoch 2 batch 1", 3),
        ("epoch 3 batch 0", 4),
    ]
    assert loader.n_epochs == 3


def test_a_framework_may_draw_several_batches_for_a_step_across_epochs(state: StateKeeper) -> None:
    counts = iter([1, 2, 0])
    runner = StepRunner(
        lambda batches: batches,
        None,
        state,
        Loader(),
        draw=lambda next_batch: [next_batch() for _ in range(next(counts))],
    )
    assert runner() == ["epoch 1 batch 0"]
    assert runner() == ["epoch 1 batch 1", "epoch 2 batch 0"]
    assert runner() == []


def test_values_recorded_without_a_job_are_dropped(state: StateKeeper) -> None:
    runner = StepRunner(lambda: runner.record(loss=1.0), None, state, None)
    assert runner() is None


def test_the_loader_is_not_touched_before_the_first_call(state: StateKeeper) -> None:
    loader = Loader()
    StepRunner(lambda batch: batch, None, state, loader)
    assert loader.n_epochs == 0


def test_an_object_that_is_no_loader_is_refused_before_any_step(state: StateKeeper) -> None:
    with pytest.raises(ConfigError, match="data: a int cannot be iterated"):
        StepRunner(lambda batch: batch, None, state, 5)


def test_an_exception_of_the_step_passes_through_and_the_next_call_runs(state: StateKeeper) -> None:
    def step(should_fail: bool) -> str:
        if should_fail:
            raise ZeroDivisionError("of the step")
        return "done"

    runner = StepRunner(step, None, state, None)
    with pytest.raises(ZeroDivisionError, match="of the step"):
        runner(True)
    assert runner(False) == "done"


def test_leaving_the_block_waits_for_nobody(state: StateKeeper) -> None:
    with StepRunner(lambda: 1, None, state, None) as runner:
        assert runner() == 1
    runner.close()


def test_an_exception_in_the_block_passes_through(state: StateKeeper) -> None:
    with pytest.raises(ZeroDivisionError):
        with StepRunner(lambda: 1 // 0, None, state, None) as runner:
            runner()
