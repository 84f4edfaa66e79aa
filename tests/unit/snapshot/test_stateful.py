"""What is collected, and what is refused by name, all problems at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from deadpool.errors import ConfigError, LayoutMismatch
from deadpool.snapshot.blob import why_not_now
from deadpool.snapshot.layout import Kind
from deadpool.snapshot.stateful import collect, layout_of


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Closure:
    def state_dict(self) -> dict[str, Any]:
        return {"fine": 1, "rule": lambda: None}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def problems_of(**objects: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        collect(objects)
    return raised.value.problems


def test_all_problems_are_listed_at_once_each_with_its_name_and_remedy() -> None:
    model = nn.Linear(2, 2)
    problems = problems_of(
        model=model,
        optimizer=torch.optim.Rprop(model.parameters()),
        data=iter([1, 2]),
        loader=DataLoader([1, 2]),  # type: ignore[arg-type]
        numbers=(number for number in [1]),
        schedule=Closure(),
        loss=torch.nn.functional.mse_loss,
        texts=["a", "b"],
    )
    assert len(problems) == 7
    text = "\n".join(problems)
    assert "data: a bare iterator (list_iterator)" in text and "call iter() inside train" in text
    assert "loader: a plain DataLoader" in text and "StatefulDataLoader" in text
    assert "numbers: a bare iterator (generator)" in text
    assert "schedule.state_dict()['rule'] is a builtins.function" in text and "plain values" in text
    assert "loss: function has no state_dict() and load_state_dict()" in text
    assert "texts: list has no state_dict()" in text
    assert "optimizer: a Rprop without state" in text


def test_nothing_at_all_is_refused() -> None:
    assert problems_of(model=None) == ("nothing to protect: pass model=, optimizer= and data= to wrap",)


def test_none_is_data_that_is_a_function_of_the_step() -> None:
    state = collect({"model": nn.Linear(2, 2), "data": None})
    assert state.objects == ()


def test_tensors_that_cannot_be_captured_are_refused_by_name() -> None:
    model = nn.Module()
    model.register_parameter("meta", nn.Parameter(torch.empty(2, device="meta")))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_buffer("expanded", torch.zeros(1, 3).expand(4, 3))
    with torch.inference_mode():
        model.register_buffer("inferred", torch.zeros(2))
    model.add_module("lazy", nn.LazyLinear(2))
    text = "\n".join(problems_of(model=model))
    assert "model.meta: is on the meta device" in text
    assert "model.sparse: has layout torch.sparse_coo" in text
    assert "model.expanded: has elements that share memory" in text
    assert "model.inferred: was made in inference mode" in text
    assert "model.lazy.weight: a lazy module that was never run" in text


def test_any_number_of_models_optimizers_and_objects_is_named_after_its_keyword() -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (generator, critic)]
    schedulers = {
        "slow": torch.optim.lr_scheduler.StepLR(optimizers[0], 2),
        "fast": torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.1, total_steps=10, cycle_momentum=False),
    }
    state = collect(
        {
            "generator": generator,
            "critic": critic,
            "optimizer": optimizers,
            "scheduler": schedulers,
            "counter": Counter(),
            "noise": torch.Generator(),
            "scaler": torch.amp.GradScaler("cpu"),
        }
    )
    names = [item.name for item in state.tensors]
    assert names[:4] == ["generator.weight", "generator.bias", "critic.weight", "critic.bias"]
    assert "optimizer.1.state.critic.bias.momentum_buffer" in names
    assert [name for name, _ in state.objects] == [
        "scheduler.slow",
        "scheduler.fast",
        "counter",
        "noise",
        "scaler",
    ]
    assert [name for name, _ in state.optimizers] == ["optimizer.0", "optimizer.1"]


def test_a_tied_parameter_is_captured_once_and_one_outside_every_model_too() -> None:
    model = nn.Module()
    model.first = nn.Linear(3, 3)
    model.second = nn.Linear(3, 3)
    model.second.weight = model.first.weight
    loose = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([*model.parameters(), loose])
    names = [item.name for item in collect({"model": model, "optimizer": optimizer}).tensors]
    assert names[:3] == ["model.first.weight", "model.first.bias", "model.second.bias"]
    assert "optimizer.group0.3" in names
    assert "optimizer.state.optimizer.group0.3.exp_avg" in names
    assert len(names) == len(set(names))


def test_large_tables_that_the_constructor_computes_are_checked_not_copied() -> None:
    def build(fill: float) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.full((200, 200), fill), persistent=False)
        model.register_buffer("small", torch.ones(3), persistent=False)
        model.register_buffer("kept", torch.ones(200, 200))
        return model

    state = collect({"model": build(1.0)})
    layout = layout_of(state)
    names = [buffer.name for buffer in layout.buffers]
    assert "model.table" not in names and "model.small" in names and "model.kept" in names
    assert [name for name, _ in layout.derived] == ["model.table"]
    assert layout_of(collect({"model": build(1.0)})) == layout
    assert layout_of(collect({"model": build(2.0)})) != layout
    assert why_not_now(state, has_stepped=True) is None
    state.models[0][1].get_buffer("table").add_(1.0)
    with pytest.raises(LayoutMismatch, match=r"^model\.table: changed since wrap; register it"):
        why_not_now(state, has_stepped=True)  # raised: nor at any later boundary


def test_without_a_group_everything_is_unique() -> None:
    model = nn.Linear(2, 2)
    layout = layout_of(collect({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}))
    assert {buffer.kind for buffer in layout.buffers} == {Kind.UNIQUE}
    assert layout.replicated_bytes == 0 and layout.groups == ()
