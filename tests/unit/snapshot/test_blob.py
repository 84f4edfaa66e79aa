"""The blob: exact round trips without pickle, refusals by path, and restores of every kind of object."""

from __future__ import annotations

import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from deadpool.errors import IntegrationError, LayoutMismatch, ReplicaCorrupt
from deadpool.snapshot.blob import build_blob, capacity_for, read_blob, why_not_now
from deadpool.snapshot.codec import Unstorable, pack, tensor_bytes, unpack
from deadpool.snapshot.restore import restore_blob, restore_rng
from deadpool.snapshot.stateful import TrainingState, collect
from tests.unit.snapshot.support import never_serve

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


def same_type(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return all(map(same_type, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return all(same_type(left[key], right[key]) for key in left)
    return True


@given(values)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    back = unpack(pack(value, "value"))
    assert back == value
    assert same_type(value, back)


def test_tensors_arrays_counters_and_huge_integers_come_back_exactly() -> None:
    value = {
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "half": torch.randn(3, 2, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(4, 3).t(),
        "array": np.arange(6, dtype=">i2").reshape(2, 3),
        "number": np.float32(1.5),
        "huge": 2**127 - 1,
        "small": -(2**100),
        "milestones": Counter({30: 1, 80: 2}),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "complex": 1 - 2j,
    }
    back = unpack(pack(value, "value"))
    for name, item in value.items():
        if isinstance(item, torch.Tensor):
            assert back[name].dtype is item.dtype and back[name].shape == item.shape
            assert tensor_bytes(back[name]) == tensor_bytes(item)
            back[name].zero_()  # owned, writable memory
        elif isinstance(item, np.ndarray | np.generic):
            assert back[name].dtype == item.dtype and np.array_equal(back[name], item)
        else:
            assert back[name] == item
    assert type(back["milestones"]) is Counter and list(back["ordered"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, lambda: None]}, r"blob\['a'\]\[1\] is a builtins.function"),
        ({"a": (object(),)}, r"blob\['a'\]\[0\] is a builtins.object"),
        ({"a": {3: {1, 2}, "b": nn.Linear(1, 1)}}, r"blob\['a'\]\['b'\] is a torch.nn.modules.linear.Linear"),
        (torch.eye(2).to_sparse(), r"blob is a Tensor \(torch.sparse_coo"),
        (np.array([object()]), "blob is a numpy array of Python objects"),
        (type("Text", (str,), {})("x"), "blob is a .*Text"),
    ],
)
def test_what_needs_pickle_is_refused_by_its_path(value: object, path: str) -> None:
    with pytest.raises(Unstorable, match=path):
        pack(value, "blob")


class Bomb:
    """Would set off when unpickled."""

    armed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "armed", True)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x81", pickle.dumps(Bomb()), b"\xc7\x01\x7f\x00", bytes(100)]
)
def test_bytes_that_are_no_blob_are_refused_and_never_run(data: bytes) -> None:
    with pytest.raises(ReplicaCorrupt):
        read_blob(data)
    assert not Bomb.armed


def test_a_value_that_needs_pickle_later_in_the_run_is_refused_by_name() -> None:
    holder = Holder()
    state = collect({"holder": holder})
    holder.value = object()
    with pytest.raises(
        IntegrationError, match=r"after step 7 .*\['holder'\]\['state'\]\['value'\] is a builtins.object"
    ):
        build_blob(state, step=7)


class Holder:
    def __init__(self) -> None:
        self.value: object = 1

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


class Moody(nn.Linear):
    """Keeps a number that only get_extra_state knows."""

    mood = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"mood": self.mood}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.mood = state["mood"]


class Job:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(Moody(3, 3), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=torch.tensor(0.1), capturable=False, foreach=False
        )
        self.warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=3)
        self.steps = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.holder = Holder()
        self.noise = torch.Generator().manual_seed(3)
        self.state: TrainingState = collect(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": [self.warm, self.steps],
                "scaler": self.scaler,
                "holder": self.holder,
                "noise": self.noise,
            }
        )

    def step(self) -> None:
        loss = self.model(torch.randn(4, 3, generator=self.noise)).pow(2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.warm.step()
        self.steps.step()
        self.holder.value = {"count": self.steps.last_epoch}
        first = self.model[0]
        assert isinstance(first, Moody)
        first.mood += 1

    def facts(self) -> dict[str, object]:
        first = self.model[0]
        assert isinstance(first, Moody)
        return {
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "warm": self.warm.state_dict(),
            "steps": {key: value for key, value in self.steps.state_dict().items() if key != "_last_lr"},
            "scale": self.scaler.state_dict(),
            "holder": self.holder.value,
            "mood": first.mood,
            "training": [module.training for module in self.model.modules()],
            "noise": self.noise.get_state().tolist(),
            "draws": (random.random(), float(np.random.rand()), torch.rand(()).item()),
        }


def test_every_object_comes_back_in_place_and_in_a_new_process_state() -> None:
    job = Job()
    job.step()
    job.step()
    blob = read_blob(build_blob(job.state, step=2, counters={"seen": 5}))
    rate = job.optimizer.param_groups[0]["lr"]
    expected = job.facts()
    for _ in range(3):
        job.step()
    job.model.eval()
    for target in (job, Job()):
        restore_blob(target.state, blob, serve=never_serve)
        restore_rng(target.state, blob)
        assert target.facts() == expected
    assert job.optimizer.param_groups[0]["lr"] is rate, "a learning rate on the device keeps its tensor"
    assert (blob.step, blob.counters, blob.in_loop) == (2, {"seen": 5}, True)


def test_an_abort_between_unscale_and_update_leaves_no_trace_in_the_scaler() -> None:
    job = Job()
    job.step()
    blob = read_blob(build_blob(job.state, step=1))
    job.scaler.scale(job.model(torch.randn(4, 3)).sum()).backward()
    job.scaler.unscale_(job.optimizer)
    restore_blob(job.state, blob, serve=never_serve)
    job.scaler.scale(job.model(torch.randn(4, 3)).sum()).backward()
    job.scaler.unscale_(job.optimizer)  # torch refuses a second one between two updates


def test_a_gradient_is_dropped_or_zero_as_it_was_at_the_boundary() -> None:
    model = nn.Linear(2, 2)
    state = collect({"model": model})
    model.weight.grad = torch.zeros(2, 2)
    blob = read_blob(build_blob(state, step=1))
    model.bias.grad = torch.ones(2)
    kept = model.weight.grad
    kept.fill_(5.0)
    restore_blob(state, blob, serve=never_serve)
    assert [param.grad is kept for param in model.parameters()] == [True, False]
    assert not kept.any()
    model.zero_grad()
    restore_blob(state, blob, serve=never_serve)
    assert [None if param.grad is None else param.grad.any().item() for param in model.parameters()] == [
        False,
        None,
    ]


def test_gradients_carried_over_a_boundary_are_not_captured() -> None:
    model = nn.Linear(2, 2)
    state = collect({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    assert why_not_now(state, has_stepped=False) is None
    model(torch.ones(1, 2)).sum().backward()
    assert why_not_now(state, has_stepped=True) is None, "zeroed at the start of the next step"
    reason = why_not_now(state, has_stepped=False)
    assert reason is not None and reason.startswith("model.weight: no optimizer stepped")


def test_a_blob_of_another_script_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    blob = read_blob(build_blob(collect({"model": model, "holder": Holder()}), step=1))
    with pytest.raises(LayoutMismatch, match=r"objects are \['holder'\], this script has \['other'\]"):
        restore_blob(collect({"model": model, "other": Holder()}), blob, serve=never_serve)
    with pytest.raises(LayoutMismatch, match="2 trainable parameters, this script 1"):
        restore_blob(
            collect({"model": nn.Linear(2, 2, bias=False), "holder": Holder()}), blob, serve=never_serve
        )


def test_capacity_leaves_room_for_a_growing_position() -> None:
    assert capacity_for(1000) == 256 * 1024
    assert capacity_for(1_000_000) >= 4_000_000
    assert capacity_for(1_000_001) % 4096 == 0


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiStepLR(o, [2, 4]), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_scheduler_of_torch_goes_on_with_the_same_rates(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    state = collect({"optimizer": optimizer, "schedule": schedule})

    def run(steps: int) -> list[tuple[float, float]]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return rates

    run(3)
    blob = read_blob(build_blob(state, step=3))
    expected = run(5)
    restore_blob(state, blob, serve=never_serve)
    assert run(5) == expected
