"""What the adapter of each kind of engine captures is all that a step depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.ops.adam import FusedAdam

from deadpool.plugins import deepspeed
from deadpool.plugins.deepspeed.parts import create_fused_adam_state
from deadpool.snapshot.codec import tensor_bytes
from deadpool.snapshot.stateful import collect
from tests.plugins.deepspeed.engines import Kind, Trainer, cases, make_config, make_model, trainer
from tests.plugins.deepspeed.loopback import world
from tests.unit.snapshot.support import Keeper, digest, keeping

KINDS = [
    Kind(stage=0, dtype="fp32"),
    Kind(stage=0, dtype="bf16"),
    Kind(stage=1, dtype="bf16"),
    Kind(stage=1, dtype="bf16", gradients="fp32", accumulate=2),
    Kind(stage=1, dtype="fp32", accumulate=2, overlap=False),
    Kind(stage=2, dtype="bf16", accumulate=2),
    Kind(stage=2, dtype="fp32", overlap=False),
    Kind(stage=3, dtype="bf16", accumulate=2),
    Kind(stage=3, dtype="fp32", overlap=False),
    Kind(stage=1, dtype="bf16", stages=2, accumulate=2),
    Kind(stage=0, dtype="fp32", stages=2, accumulate=2),
]


def outcome(own: Trainer, first: int, last: int) -> tuple[list[float], str, list[float]]:
    losses = [own.step(number) for number in range(first, last)]
    return losses, digest(own.state), own.engine.get_lr()


@pytest.mark.parametrize("kind", cases(KINDS, 0, 1, 2, 3, 5, 7, 9))
def test_whoever_takes_a_snapshot_over_trains_on_as_the_engine_that_made_it(kind: Kind) -> None:
    with trainer(kind) as own:
        with keeping(own.state) as keeper:
            for number in range(3):
                own.step(number)
            blob, banks = keeper.take(3), keeper.banks
            expected = outcome(own, 3, 6)
            assert go_back_and_on(own, keeper, blob) == expected
    with trainer(kind) as fresh:
        with keeping(fresh.state) as keeper:
            keeper.banks = banks
            assert go_back_and_on(fresh, keeper, blob) == expected


def go_back_and_on(own: Trainer, keeper: Keeper, blob: bytes) -> tuple[list[float], str, list[float]]:
    keeper.go_back(blob)
    assert own.engine.global_steps == 3
    return outcome(own, 3, 6)


@pytest.mark.parametrize("kind", cases(KINDS, 1, 2, 7))
def test_creating_the_lazy_state_changes_no_bit(kind: Kind) -> None:
    with trainer(kind) as plain:
        undisturbed = [plain.step(number) for number in range(3)]
        expected = {name: tensor_bytes(value) for name, value in named(plain).items()}
    with trainer(kind) as own:
        assert own.state.adapters
        assert [own.step(number) for number in range(3)] == undisturbed
        assert {name: tensor_bytes(value) for name, value in named(own).items()} == expected


def named(own: Trainer) -> dict[str, torch.Tensor]:
    own.engine.data_iterator = None  # of a pipeline; refused before wrap
    return {item.name: item.resolve() for item in own.state.tensors}


def test_unique_bytes_of_each_stage_are_those_of_the_paper() -> None:
    """Masters and two moments, 12 bytes per parameter: divided over the ranks from stage 1 on."""
    for stage, dtype in [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")]:
        with trainer(Kind(stage=stage, dtype=dtype)) as own:
            params = sum(
                getattr(param, "ds_numel", param.numel())
                for param in own.engine.module.parameters()
                if param.requires_grad
            )
            unique = sum(
                item.resolve().nbytes
                for item in own.state.tensors
                if not item.ranks and item.resolve().numel() > 1 and "module." not in item.name
            )
            if stage == 0:
                assert unique == 0
            else:
                assert 12 * params / 3 <= unique <= 12 * (params / 3 + 200)  # padding of the partitions


def test_a_boundary_within_an_accumulation_is_not_captured() -> None:
    with trainer(Kind(stage=2, accumulate=2)) as own:
        (_, adapter), *_ = own.state.adapters
        assert adapter.why_not_now(has_stepped=False) is None
        own.kind = Kind(stage=2, accumulate=1)  # one micro-batch of two
        own.step(0)
        assert (
            adapter.why_not_now(has_stepped=False) == "engine: gradients are accumulated over this boundary"
        )
        own.step(1)
        assert adapter.why_not_now(has_stepped=True) is None


def test_a_caller_that_sets_the_boundary_itself_is_captured_where_it_stepped() -> None:
    with trainer(Kind(stage=1)) as own:
        (_, adapter), *_ = own.state.adapters
        own.engine.set_gradient_accumulation_boundary(False)
        assert (
            adapter.why_not_now(has_stepped=False) == "engine: gradients are accumulated over this boundary"
        )
        own.engine.set_gradient_accumulation_boundary(True)
        assert adapter.why_not_now(has_stepped=True) is None


def test_padding_of_a_partition_is_the_same_in_every_run() -> None:
    with world(2, 3):  # the last rank's partitions are padded
        deepspeed.init_distributed(verbose=False)
        model: Any = make_model()
        engine, *_ = deepspeed.initialize(model=model, config=make_config(Kind(stage=3)))
        sizes = [(param.partition_numel(), param.ds_numel) for param in model.parameters()]
        for param in model.parameters():
            param.ds_tensor.data.fill_(7)
        for flat in engine.optimizer.fp32_partitioned_groups_flat:
            flat.data.fill_(7)
        collect({"engine": engine})
        used = sum(max(0, min(size, numel - 2 * size)) for size, numel in sizes)
        assert used < sum(size for size, _ in sizes)
        assert sum(int(param.ds_tensor.count_nonzero()) for param in model.parameters()) == used
        flats = engine.optimizer.fp32_partitioned_groups_flat
        assert sum(int(flat.count_nonzero()) for flat in flats) == used - _frozen_used(model)


def _frozen_used(model: torch.nn.Module) -> int:
    frozen: list[Any] = [param for param in model.parameters() if not param.requires_grad]
    return sum(max(0, min(p.partition_numel(), p.ds_numel - 2 * p.partition_numel())) for p in frozen)


def test_the_state_made_for_fused_adam_is_what_its_first_step_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, params: Any) -> None:
        defaults = {
            "lr": 0.1,
            "bias_correction": True,
            "betas": (0.9, 0.99),
            "eps": 1e-8,
            "weight_decay": 0.0,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.adam_w_mode, self.set_grad_none = 1, True
        self._dummy_overflow_buf = torch.zeros(1)
        self.multi_tensor_adam = lambda *arguments: None  # the kernel, which runs on GPUs only

    monkeypatch.setattr(FusedAdam, "__init__", init)
    ours, theirs = ([torch.nn.Parameter(torch.ones(3))] for _ in range(2))
    optimizers: list[Any] = [FusedAdam(ours), FusedAdam(theirs)]
    create_fused_adam_state(optimizers[0], ours)
    for param, optimizer in zip((ours[0], theirs[0]), optimizers, strict=True):
        param.grad = torch.ones(3)
        optimizer.step()
    made, expected = optimizers[0].state[ours[0]], optimizers[1].state[theirs[0]]
    assert made.keys() == expected.keys()
    assert made["step"] == expected["step"] == 1
    assert all(torch.equal(made[key], expected[key]) for key in ("exp_avg", "exp_avg_sq"))
    assert optimizers[0].param_groups[0]["step"] == optimizers[1].param_groups[0]["step"]
