"""A framework with state classes of its own: what its adapter says is captured and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from deadpool.errors import ConfigError, LayoutMismatch
from deadpool.snapshot import adapter
from deadpool.snapshot.adapter import StateAdapter, forget_builds, register_adapter, register_forgetter
from deadpool.snapshot.blob import build_blob, why_not_now
from deadpool.snapshot.stateful import collect
from deadpool.snapshot.tensors import NamedTensor
from tests.unit.snapshot.support import digest, keeping


class Engine(nn.Module):
    """A framework's engine: flat fp32 masters, a bf16 model that is cast from them, a counter, a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
        self.masters = nn.Parameter(torch.cat([param.detach().float().flatten() for param in self.weights()]))
        self.optimizer = torch.optim.SGD([self.masters], lr=0.1, momentum=0.9)
        self.masters.grad = torch.zeros_like(self.masters)
        self.optimizer.step()  # creates the momentum
        self.masters.grad = None
        self.global_steps = 0
        self.bucket: list[torch.Tensor] = []

    def weights(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def cast(self) -> None:
        parts = torch.split(self.masters.detach(), [param.numel() for param in self.weights()])
        for param, part in zip(self.weights(), parts, strict=True):
            param.data.copy_(part.view_as(param))

    def train_batch(self, value: float) -> None:
        self.module(torch.full((2, 4), value, dtype=torch.bfloat16)).sum().backward()
        self.bucket = [param.grad for param in self.weights() if param.grad is not None]
        self.masters.grad = torch.cat([grad.float().flatten() for grad in self.bucket]) + value
        self.optimizer.step()
        self.masters.grad, self.bucket = None, []
        self.cast()
        for param in self.weights():
            param.grad = None
        self.global_steps += 1


class EngineAdapter(StateAdapter):
    def __init__(self, name: str, engine: Engine) -> None:
        if not isinstance(engine.optimizer, torch.optim.SGD):
            raise ConfigError([f"{name}: an optimizer that is not SGD", f"{name}: and another reason"])
        self._name = name
        self._engine = engine

    def tensors(self) -> Sequence[NamedTensor]:
        engine = self._engine
        momentum = engine.optimizer.state[engine.masters]
        return [
            NamedTensor(
                name=f"{self._name}.masters", resolve=lambda: engine.masters.detach(), at_boundary=False
            ),
            NamedTensor(
                name=f"{self._name}.momentum", resolve=lambda: momentum["momentum_buffer"], at_boundary=False
            ),
        ]

    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        return [(f"{self._name}.module", self._engine.module)]

    def optimizers(self) -> Sequence[tuple[str, torch.optim.Optimizer]]:
        return [(f"{self._name}.optimizer", self._engine.optimizer)]

    def why_not_now(self, *, has_stepped: bool) -> str | None:
        return "gradients are carried over the boundary" if self._engine.bucket else None

    def read(self) -> Mapping[str, object]:
        return {"global_steps": self._engine.global_steps}

    def reset(self) -> None:
        self._engine.bucket = []
        self._engine.masters.grad = None
        for param in self._engine.weights():
            param.grad = None

    def restore(self, stored: Mapping[str, Any]) -> None:
        self._engine.global_steps = stored["global_steps"]
        self._engine.cast()


@pytest.fixture
def engine() -> Iterator[Engine]:
    register_adapter(Engine, EngineAdapter)
    yield Engine()


def model_bytes(engine: Engine) -> list[torch.Tensor]:
    return [value.clone() for value in engine.module.state_dict().values()]


def test_what_the_adapter_names_is_captured_and_the_rest_is_computed_again(engine: Engine) -> None:
    state = collect({"engine": engine})
    with keeping(state) as keeper:
        engine.train_batch(0.5)
        blob = keeper.take(1)
        engine.module.eval()
        engine.train_batch(0.25)  # its optimizer waits for the copy
        engine.optimizer.param_groups[0]["lr"] = 9.0
        engine.bucket = [torch.ones(1)]
        keeper.go_back(blob)
        assert engine.global_steps == 1
        assert engine.optimizer.param_groups[0]["lr"] == 0.1
        assert engine.module.training
        assert engine.bucket == []

        undisturbed = Engine()
        undisturbed.train_batch(0.5)
        for step in (0.25, 0.125):
            engine.train_batch(step)
            undisturbed.train_batch(step)
        assert digest(state) == digest(collect({"engine": undisturbed}))
        assert all(map(torch.equal, model_bytes(engine), model_bytes(undisturbed)))


def test_parameters_of_an_adapted_module_are_not_captured_but_its_buffers_are(engine: Engine) -> None:
    names = [item.name for item in collect({"engine": engine}).tensors]
    assert names == [
        "engine.masters",
        "engine.momentum",
        "engine.module.1.running_mean",
        "engine.module.1.running_var",
        "engine.module.1.num_batches_tracked",
    ]


def test_the_adapter_may_say_that_a_boundary_cannot_be_captured(engine: Engine) -> None:
    state = collect({"engine": engine})
    assert why_not_now(state, has_stepped=True) is None
    engine.bucket = [torch.ones(1)]
    assert why_not_now(state, has_stepped=True) == "gradients are carried over the boundary"


def test_problems_of_an_adapted_object_are_listed_with_all_others(engine: Engine) -> None:
    engine.optimizer = torch.optim.Adam([engine.masters])  # type: ignore[assignment]  # what it refuses
    with pytest.raises(ConfigError) as refusal:
        collect({"engine": engine, "data": iter(())})
    assert len(refusal.value.problems) == 3


def test_a_snapshot_without_the_adapted_object_is_refused(engine: Engine) -> None:
    plain = collect({"model": nn.Linear(2, 2)})
    blob = build_blob(plain, step=1)
    with keeping(collect({"engine": engine})) as keeper, pytest.raises(LayoutMismatch):
        keeper.go_back(blob)


def test_a_module_that_no_plugin_knows_is_an_ordinary_model() -> None:
    assert not collect({"model": nn.Linear(2, 2)}).adapters


def test_an_engine_whose_plugin_is_not_loaded_is_refused_with_the_line_that_loads_it() -> None:
    unknown = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(ConfigError, match=r"engine: a DeepSpeedEngine needs .*`from deadpool.plugins import"):
        collect({"engine": unknown()})


def test_what_a_framework_keeps_per_process_is_forgotten_once_for_each_discarded_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "_forgetters", [])  # without those of plugins that other tests have loaded
    calls: list[str] = []

    def forget() -> None:
        calls.append("forgotten")

    register_forgetter(forget)
    register_forgetter(forget)
    forget_builds()
    assert calls == ["forgotten"]
