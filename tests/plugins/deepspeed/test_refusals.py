"""What would come back inexact is refused by name, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn

from deadpool.errors import ConfigError
from deadpool.plugins import deepspeed
from deadpool.snapshot.stateful import collect
from tests.plugins.deepspeed.engines import WIDTH, Kind, make_config, make_model
from tests.plugins.deepspeed.loopback import world


def refused(config: dict[str, Any], model: nn.Module | None = None, **arguments: Any) -> str:
    """The problems of an engine that DeepSpeed itself accepts."""
    with world(0, 2):
        engine, *_ = deepspeed.initialize(model=model or make_model(), config=config, **arguments)
        with pytest.raises(ConfigError) as refusal:
            collect({"engine": engine})
        return str(refusal.value)


def config_of(stage: int, **zero: Any) -> dict[str, Any]:
    config = make_config(Kind(stage=stage))
    config["zero_optimization"].update(zero)
    return config


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
def test_the_adams_that_deepspeed_has_for_cpus_are_refused(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their C++ part takes half a minute to build; the class is what is refused.
    monkeypatch.setattr(kind, "__init__", _init_adam)
    monkeypatch.setattr(kind, "__del__", lambda self: None, raising=False)
    model = make_model()
    params = [param for param in model.parameters() if param.requires_grad]
    config = config_of(1)
    del config["optimizer"], config["scheduler"]
    assert "CPU optimizers keep running products" in refused(config, model, optimizer=kind(params))


def test_the_wrapper_that_deepspeed_puts_around_its_fused_adam_without_zero_is_refused() -> None:
    with world(0, 2):
        engine, *_ = deepspeed.initialize(model=make_model(), config=config_of(0))
        engine.optimizer = object()
        with pytest.raises(ConfigError, match="the optimizer object is not covered; use ZeRO stage 1"):
            collect({"engine": engine})


def _init_adam(optimizer: Any, params: Any) -> None:
    torch.optim.Optimizer.__init__(optimizer, params, {"lr": 0.1, "amsgrad": False})


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_of_the_optimizer_to_the_cpu_is_refused(stage: int) -> None:
    config = config_of(stage, offload_optimizer={"device": "cpu", "pin_memory": False})
    config["zero_force_ds_cpu_optimizer"] = False
    assert "offload to the CPU is not covered" in refused(config)


def test_offload_to_nvme_is_refused(tmp_path: Path) -> None:
    config = config_of(3)
    with world(0, 2):
        engine, *_ = deepspeed.initialize(model=make_model(), config=config)
        # DeepSpeed opens the device as it builds; what it was asked for is all that is looked at.
        offload = {"device": "nvme", "nvme_path": str(tmp_path)}
        zero = deepspeed.runtime.zero.config.DeepSpeedZeroConfig(stage=3, offload_param=offload)
        engine._config.zero_config = zero
        with pytest.raises(ConfigError, match="offload to NVMe is not covered"):
            collect({"engine": engine})


def test_a_mixture_of_experts_is_refused() -> None:
    with world(0, 2):
        deepspeed.init_distributed(verbose=False)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2))
        engine, *_ = deepspeed.initialize(model=model, config=config_of(0))
        with pytest.raises(ConfigError, match="mixture-of-experts layers are not covered"):
            collect({"engine": engine})


def test_curriculum_learning_is_refused() -> None:
    config = config_of(1)
    learning = {"enabled": True, "curriculum_metrics": {"length": {}}}
    sampling = {"enabled": True, "num_workers": 0, "curriculum_learning": learning}
    config["data_efficiency"] = {"enabled": True, "data_sampling": sampling}
    assert "curriculum learning and data sampling of DeepSpeed are not covered" in refused(config)


def test_random_ltd_is_refused() -> None:
    config = config_of(1)
    schedule = {"min_value": 2, "max_value": 4, "schedule_type": "fixed_linear", "schedule_config": {}}
    schedule["schedule_config"] = {"require_steps": 10, "seq_per_step": 1}
    random_ltd = {
        "enabled": True,
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "random_ltd_layer_id": [1],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
    }
    routing = {"enabled": True, "random_ltd": random_ltd}
    config["data_efficiency"] = {"enabled": True, "data_routing": routing}
    assert "random-LTD is not covered" in refused(config)


def test_hpz_is_refused() -> None:
    assert "hpZ is not covered" in refused(config_of(3, zero_hpz_partition_size=2))


@pytest.mark.parametrize(
    "field", ["zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"]
)
def test_quantisation_of_zero_plus_plus_is_refused(field: str) -> None:
    with world(0, 2):
        engine, *_ = deepspeed.initialize(model=make_model(), config=config_of(3))
        setattr(engine._config.zero_config, field, True)  # its kernels exist for GPUs only
        with pytest.raises(ConfigError, match=r"quantisation of ZeRO\+\+ is not covered"):
            collect({"engine": engine})


def test_an_optimizer_whose_lazy_state_is_unknown_is_refused() -> None:
    config = config_of(2)
    config["zero_allow_untested_optimizer"] = True
    del config["optimizer"], config["scheduler"]

    class Odd(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> Any:
            return None

    assert "what its first step creates is unknown" in refused(config, optimizer=Odd)


def test_an_iterator_that_the_engine_was_given_before_wrap_is_refused() -> None:
    with world(0, 4):
        deepspeed.init_distributed(verbose=False)
        model = deepspeed.PipelineModule(list(make_model()), num_stages=2, loss_fn=nn.CrossEntropyLoss())
        engine, *_ = deepspeed.initialize(model=model, config=config_of(1))
        engine.set_dataiterator(iter([]))
        with pytest.raises(ConfigError, match="an iterator was given to the engine before wrap"):
            collect({"engine": engine})


def test_every_problem_is_listed() -> None:
    config = config_of(3, zero_hpz_partition_size=2, offload_optimizer={"device": "cpu"})
    config["zero_force_ds_cpu_optimizer"] = False
    problems = refused(config).splitlines()
    assert len(problems) == 2
    assert all(problem.startswith("engine: ") for problem in problems)
