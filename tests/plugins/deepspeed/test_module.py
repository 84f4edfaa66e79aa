"""The module in place of DeepSpeed's: what it defines itself, and what it leaves alone."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

import deepspeed as plain
import pytest
import torch.distributed as dist
from torch import nn

from deadpool.errors import ConfigError, IntegrationError
from deadpool.plugins import deepspeed
from deadpool.plugins.deepspeed.process import module_counter
from deadpool.plugins.deepspeed.settings import Settings, check_version, split_config
from deadpool.snapshot.stateful import collect
from tests.plugins.deepspeed.engines import Kind, make_config, make_model, trainer
from tests.plugins.deepspeed.loopback import world

OWN = {"initialize"}


def test_every_attribute_that_it_does_not_define_is_deepspeeds_own() -> None:
    names = {name for name in dir(plain) if not name.startswith("_")} - OWN
    differing = [name for name in names if getattr(deepspeed, name) is not getattr(plain, name)]
    assert not differing
    assert deepspeed.zero.Init is plain.zero.Init
    assert deepspeed.init_distributed is plain.init_distributed
    assert deepspeed.__version__ == plain.__version__
    with pytest.raises(AttributeError):
        deepspeed.no_such_name  # noqa: B018 the access is the test


def test_config_arguments_are_added_to_a_parser_as_by_deepspeed() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--deepspeed_config", "x.json"]).deepspeed_config == "x.json"


def test_initialize_has_deepspeeds_signature() -> None:
    assert inspect.signature(deepspeed.initialize) == inspect.signature(plain.initialize)


def test_initialize_returns_what_deepspeed_returns_and_takes_its_section_out() -> None:
    config = {**make_config(Kind(stage=1)), "deadpool": {}}
    with world(0, 2):
        model = make_model()
        engine, optimizer, loader, scheduler = deepspeed.initialize(None, model, config=config)
        assert isinstance(engine, plain.DeepSpeedEngine)
        assert optimizer is engine.optimizer
        assert scheduler is engine.lr_scheduler
        assert loader is None
        assert "deadpool" not in engine.config
    assert "deadpool" in config  # the caller's own is not changed


def test_a_model_that_was_built_under_zero_init_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(make_config(Kind(stage=3))))
    with world(0, 3):
        with deepspeed.zero.Init(config_dict_or_path=str(path)):
            model = make_model()
        engine, *_ = deepspeed.initialize(model=model, config=str(path))
        assert [item.name for item in collect({"engine": engine}).tensors][:1] == ["engine.partition0"]


@pytest.mark.parametrize("form", ["dict", "file", "config_params", "args"])
def test_the_section_is_read_from_every_form_of_configuration(form: str, tmp_path: Path) -> None:
    config = {"train_batch_size": 4, "deadpool": {"collective_timeout_s": 7.5}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = argparse.Namespace(deepspeed_config=str(path))
    given: dict[str, dict[str, Any]] = {
        "dict": {"config": config},
        "file": {"config": str(path)},
        "config_params": {"config_params": config},
        "args": {"args": options},
    }
    arguments = given[form]
    assert split_config(arguments) == Settings(collective_timeout_s=7.5)
    assert arguments["config"] == {"train_batch_size": 4}
    assert "config_params" not in arguments
    assert form != "args" or options.deepspeed_config is None


def test_all_wrong_keys_of_the_section_are_listed_with_what_was_meant() -> None:
    section = {"collective_timeout": 3, "lease_ttl_s": 5, "colour": 1, "collective_timeout_s": -1}
    with pytest.raises(ConfigError) as refusal:
        split_config({"config": {"deadpool": section}})
    assert refusal.value.problems == (
        "deadpool.collective_timeout: unknown key; did you mean collective_timeout_s? "
        "(known: collective_timeout_s)",
        "deadpool.lease_ttl_s: a setting of the whole job, which runs before the script; "
        "give --lease-ttl-s to deadpool run",
        "deadpool.colour: unknown key (known: collective_timeout_s)",
        "deadpool.collective_timeout_s: must be a positive number, it is -1",
    )


def test_a_timeout_that_comes_after_joining_is_refused() -> None:
    config = {**make_config(Kind(stage=0)), "deadpool": {"collective_timeout_s": 5}}
    with world(0, 2), pytest.raises(ConfigError, match="has joined the job before"):
        deepspeed.initialize(model=make_model(), config=config)


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "1.0"])
def test_another_version_of_deepspeed_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(IntegrationError, match=r">=0\.19,<0\.20"):
        check_version(version)


def test_the_second_build_of_a_process_comes_out_like_the_first() -> None:
    """A spare builds more than once; ZeRO-3 compares the numbers of its modules with those of other ranks."""
    numbers = []
    for _ in range(2):
        with trainer(Kind(stage=3)) as own:
            numbers.append([module.ds_id for module in own.engine.module.modules()])
            assert module_counter()[0] > 0
    assert numbers[0] == numbers[1]
    assert not dist.is_initialized()
    assert module_counter() == [0]


def test_the_shared_memory_operator_that_goes_around_process_groups_is_off() -> None:
    assert plain.ops.__compatible_ops__["deepspeed_shm_comm"] is False


@pytest.mark.parametrize("part", ["optimizer", "loader"])
def test_parts_that_the_engine_holds_are_refused_when_given_to_wrap(part: str) -> None:
    with world(0, 2):
        dataset: Any = [nn.Linear(1, 1)]
        engine, optimizer, loader, _ = deepspeed.initialize(
            model=make_model(), training_data=dataset, config=make_config(Kind(stage=1))
        )
        given = {"optimizer": optimizer, "loader": loader}[part]
        remedy = {"optimizer": "give wrap the engine alone", "loader": "StatefulDataLoader"}[part]
        with pytest.raises(ConfigError, match=f"{part}: .*{remedy}"):
            collect({part: given})
        with pytest.raises(ConfigError, match="training_data makes a loader"):
            collect({"engine": engine})
