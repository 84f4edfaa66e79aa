"""Megatron-LM's `pretrain`, against a stand-in for its training.py."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deadpool.errors import IntegrationError
from tests.plugins.megatron.drill import MakeDrill
from tests.verifying import check_script

STAND_IN = "tests.plugins.megatron.stand_in.training"
SCRIPT = "tests/plugins/megatron/stand_in/pretrain_gpt.py"
LIMIT_S = 150.0

COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
NAMES = {
    "train": "replaced: entered again after a recovery",
    "train_step": "replaced: a turn of the loop begins",
    "checkpoint_and_decide_exit": "replaced: a turn ends; its arguments 4 and 5 are iteration and flops",
    "build_train_valid_test_data_iterators": "replaced, and called again: iterators at the consumed samples",
    "build_train_valid_test_datasets": "replaced: the datasets are kept",
    "get_args": "called: iteration, consumed_* and skipped_train_samples, num_floating_..._so_far",
    "get_timers": "called: its timers are reset",
    "get_rerun_state_machine": "called: its state is reset",
    "destroy_global_state": "called: after a throw-away build",
}
"""Names of NVIDIA/Megatron-LM's megatron/training/training.py that are relied on, as read at COMMIT."""

ENTERED_AGAIN_WITH = (
    "forward_step_func",
    "model",
    "optimizer",
    "opt_param_scheduler",
    "train_data_iterator",
    "valid_data_iterator",
    "process_non_loss_data_func",
    "config",
)
"""First arguments of `train`, by position."""


def test_every_name_that_is_relied_on_is_listed_and_is_in_the_stand_in(make_drill: MakeDrill) -> None:
    from deadpool.plugins.megatron import pretrain

    training = import_module(STAND_IN)
    assert (pretrain.UPSTREAM_COMMIT, set(pretrain.UPSTREAM_NAMES)) == (COMMIT, set(NAMES))
    assert all(hasattr(training, name) for name in NAMES)
    code = training.train.__code__
    assert code.co_varnames[: len(ENTERED_AGAIN_WITH)] == ENTERED_AGAIN_WITH


def test_a_megatron_lm_without_one_of_the_names_is_refused_with_all_that_lack(
    make_drill: MakeDrill, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deadpool.plugins.megatron import wrap_pretrain

    training = import_module(STAND_IN)
    monkeypatch.delattr(training, "train_step")
    monkeypatch.delattr(training, "get_timers")
    with pytest.raises(IntegrationError, match=r"has no get_timers, train_step: .* at commit d98e8a64ddf3"):
        wrap_pretrain(training.pretrain)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("inprocess_restart", True),
        ("async_save", True),
        ("perform_rl_step", True),
        ("hybrid_context_parallel", True),
        ("optimizer_cuda_graph", True),
        ("use_torch_fsdp2", True),
        ("dataloader_type", "external"),
    ],
)
def test_an_argument_with_state_that_is_not_known_is_refused_by_name(
    make_drill: MakeDrill, argument: str, value: Any
) -> None:
    from deadpool.plugins.megatron.pretrain import find_problems

    assert find_problems(SimpleNamespace(dataloader_type="single")) == []
    (problem,) = find_problems(SimpleNamespace(**{argument: value}))
    assert problem.startswith(f"--{argument.replace('_', '-')} is not supported: ")


def test_without_a_job_the_loop_is_megatrons_own(make_drill: MakeDrill) -> None:
    from deadpool.plugins.megatron import wrap_pretrain

    training = ModuleType("a_training_module")
    for name in NAMES:
        setattr(training, name, len)
    seen: list[Any] = []

    def pretrain(*args: Any) -> str:
        seen.append((args, vars(training)["train"]))
        return "done"

    pretrain.__module__ = training.__name__
    sys.modules[training.__name__] = training
    try:
        assert wrap_pretrain(pretrain)(1, 2) == "done"
    finally:
        del sys.modules[training.__name__]
    assert seen == [((1, 2), len)]


@pytest.mark.timeout(LIMIT_S + 10)
def test_pretraining_loses_a_rank_and_goes_on(tmp_path: Path) -> None:
    # The first commit is late by a fixed time, and these steps are short. Batches grow after step 20.
    options = ("--overlap", "--train-iters", "24")
    check_script(SCRIPT, tmp_path, 2, "sigkill:rank=1@step=12", *options, limit_s=LIMIT_S)


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
def test_counters_checkpoints_and_exit_conditions_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    options = ("--pp", "2", "--vpp", "2", "--rerun-mode", "validate_results", "--exit-interval", "10")
    fault = "sigkill:rank=0@step=7"
    check_script(SCRIPT, tmp_path / "runs", 2, fault, *options, "--save", str(saved), limit_s=LIMIT_S)
    states = [json.loads(path.read_text()) for path in sorted(saved.iterdir())]
    assert [state["iteration"] for state in states] == [5, 10]
    assert [state["flops"] for state in states] == [50.0, 100.0]
    # 80 samples of 4 an iteration, then of 8.
    assert states[-1]["consumed_valid_samples"] == 2 * 4
    assert states[-1]["scheduler"] == 10


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 10)
def test_two_ranks_are_lost_one_after_the_other(tmp_path: Path) -> None:
    faults = "sigkill:rank=1@step=10 sigkill:rank=0@step=22"
    options = ("--overlap", "--train-iters", "28")
    check_script(SCRIPT, tmp_path, 2, faults, *options, spares=2, limit_s=LIMIT_S)


def test_loading_from_an_empty_folder_that_is_saved_to_is_refused_because_a_spare_would_find_more(
    tmp_path: Path,
) -> None:
    from deadpool.plugins.megatron.pretrain import find_problems

    folder = str(tmp_path)
    (problem,) = find_problems(SimpleNamespace(load=folder, save=folder))
    assert "Leave --load out of the first launch" in problem
    assert not find_problems(SimpleNamespace(load=folder, save=str(tmp_path / "other")))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert not find_problems(SimpleNamespace(load=folder, save=folder))
