"""`wrap_pretrain`: Megatron-LM's own loop, protected without changing it.

[Note: why `train` is entered again]
Between two calls of `train_step` Megatron's loop calls collectives of its own: timers with barriers, logging,
evaluation, checkpoints, the vote on whether to exit. A rank that only repeated `train_step` would meet peers
that stand elsewhere in the loop. So after a failure every rank, survivor or spare, leaves `train` and enters
it again at the restored iteration; all of that then works as in a run that was resumed from a checkpoint,
except that no process, model, optimizer or group was made anew.

A step of DeadPool is one turn of that loop: it begins with `train_step` and ends with
`checkpoint_and_decide_exit`, where the loop's counters are complete.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunState

import deadpool
import deadpool.plugins.megatron.adapter
from deadpool.errors import CollectiveAborted, ConfigError, IntegrationError
from deadpool.plugins.megatron.objects import MegatronObjects
from deadpool.runtime.session import TrainingSession, session
from deadpool.runtime.state import StateKeeper
from deadpool.snapshot.adapter import register_forgetter

UPSTREAM_COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
"""Commit of NVIDIA/Megatron-LM at which megatron/training/training.py was read."""

UPSTREAM_NAMES = (
    "build_train_valid_test_data_iterators",
    "build_train_valid_test_datasets",
    "checkpoint_and_decide_exit",
    "destroy_global_state",
    "get_args",
    "get_rerun_state_machine",
    "get_timers",
    "train",
    "train_step",
)
"""What is replaced in, or called from, megatron/training/training.py."""

_TRACKER = "latest_checkpointed_iteration.txt"  # what Megatron reads to find its newest checkpoint
_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")

# Arguments with which the loop keeps state that this adaptor does not know, and why they are refused.
_REFUSALS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("inprocess_restart", bool, "in-process restart tears down what DeadPool keeps"),
    (
        "async_save",
        bool,
        "a checkpoint being written in the background is finished by a collective of all ranks",
    ),
    ("perform_rl_step", bool, "reinforcement learning keeps rollouts in the loop"),
    ("hybrid_context_parallel", bool, "hybrid context parallelism wraps the data iterator"),
    ("optimizer_cuda_graph", bool, "a captured graph holds aborted communicators"),
    ("use_torch_fsdp2", bool, "use megatron-core's DistributedDataParallel"),
    ("dataloader_type", lambda kind: kind == "external", "an external data loader cannot be wound back"),
)

# What `train` sets in the model's configuration, and expects unset.
_CONFIG_FIELDS = ("no_sync_func", "grad_sync_func", "param_sync_func", "grad_scale_func", "timers")


def wrap_pretrain(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Protect Megatron-LM's `pretrain`.

    Call it where the script would call `pretrain`, before anything of megatron is initialized. Megatron's
    save and load, logging, evaluation, rerun state machine and exit conditions work as ever. Without
    `deadpool run` the script trains unprotected, and says so once.

    Args:
        pretrain: megatron.training's function.

    Raises:
        IntegrationError: its module lacks a name that is relied on; lists all of them.
    """
    training = sys.modules[pretrain.__module__]
    missing = [name for name in UPSTREAM_NAMES if not hasattr(training, name)]
    if missing:
        raise IntegrationError(
            f"{training.__name__} has no {', '.join(missing)}: this Megatron-LM is not supported; "
            f"DeadPool was written for its training.py at commit {UPSTREAM_COMMIT[:12]}"
        )
    register_forgetter(training.destroy_global_state)

    @functools.wraps(pretrain)
    def protected(*args: Any, **kwargs: Any) -> Any:
        deadpool.init()
        joined = session()
        if joined is None:
            return pretrain(*args, **kwargs)
        with _Loop(training, joined).installed():
            return pretrain(*args, **kwargs)

    return protected


class _Loop:
    """Megatron's training loop, as a session runs it. Stateful: its counters are part of every snapshot."""

    def __init__(self, training: ModuleType, joined: TrainingSession) -> None:
        self._training = training
        self._session = joined
        self._train = training.train
        self._train_step = training.train_step
        self._decide_exit = training.checkpoint_and_decide_exit
        self._build_iterators = training.build_train_valid_test_data_iterators
        self._build_datasets = training.build_train_valid_test_datasets
        self._providers: list[Any] = []  # one per model chunk: each builds its iterators
        self._datasets: list[Any] = []  # what the providers gave; None on ranks that read no data
        self._iteration = 0
        self._flops: Any = 0
        self._objects: MegatronObjects | None = None
        self._is_restored = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the module's functions while `pretrain` runs."""
        training: Any = self._training
        training.train = self._run
        training.train_step = self._step
        training.checkpoint_and_decide_exit = self._end_turn
        training.build_train_valid_test_data_iterators = self._first_iterators
        training.build_train_valid_test_datasets = self._keep_datasets
        try:
            yield
        finally:
            training.train = self._train
            training.train_step = self._train_step
            training.checkpoint_and_decide_exit = self._decide_exit
            training.build_train_valid_test_data_iterators = self._build_iterators
            training.build_train_valid_test_datasets = self._build_datasets

    # ---- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        args = self._training.get_args()
        counters = {name: getattr(args, name) for name in _COUNTERS}
        return {"iteration": self._iteration, "flops": self._flops, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        args = self._training.get_args()
        self._iteration, self._flops = state["iteration"], state["flops"]
        for name in _COUNTERS:
            setattr(args, name, state[name])
        self._is_restored = True

    # ---- what stands for the functions of training.py ------------------------------------------------

    def _run(
        self,
        forward_step_func: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        train_data_iterator: Any,
        valid_data_iterator: Any,
        process_non_loss_data_func: Any,
        config: Any,
        *others: Any,
        **options: Any,
    ) -> Any:
        """`train`: entered once by `pretrain`, and again by the session after each recovery."""
        args = self._training.get_args()
        problems = find_problems(args)
        if problems:
            raise ConfigError(problems)
        self._iteration, self._flops = args.iteration, args.num_floating_point_operations_so_far
        objects = self._objects = MegatronObjects(model, optimizer, opt_param_scheduler)
        keeper = StateKeeper({"megatron": objects, "loop": self})
        fields = {name: getattr(config, name, None) for name in _CONFIG_FIELDS}
        iterators = train_data_iterator, valid_data_iterator

        def enter() -> Any:
            nonlocal iterators
            if self._is_restored:
                self._is_restored = False
                self._wind_back(config, fields)
                iterators = self._iterators_again(is_per_chunk=isinstance(train_data_iterator, list))
            try:
                return self._train(
                    forward_step_func,
                    model,
                    optimizer,
                    opt_param_scheduler,
                    *iterators,
                    process_non_loss_data_func,
                    config,
                    *others,
                    **options,
                )
            except SystemExit as exit_request:  # an exit condition of megatron: all ranks have agreed on it
                if self._session.communicators.closed_generation >= self._session.generation:
                    raise CollectiveAborted("the generation was closed as megatron ended") from exit_request
                return exit_request

        result = self._session.run(keeper, enter)
        if isinstance(result, SystemExit):
            raise result
        return result

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """`train_step`: a turn of the loop begins."""
        self._session.begin_step()
        result = self._train_step(*args, **kwargs)
        values = {**result[0], "grad_norm": result[5]}
        self._session.record(
            {name: value for name, value in values.items() if isinstance(value, torch.Tensor | float)}
        )
        return result

    def _end_turn(
        self, model: Any, optimizer: Any, opt_param_scheduler: Any, iteration: int, flops: Any, *others: Any
    ) -> Any:
        """`checkpoint_and_decide_exit`: the last that a turn of the loop does."""
        result = self._decide_exit(model, optimizer, opt_param_scheduler, iteration, flops, *others)
        self._iteration, self._flops = iteration, flops
        self._session.end_step()
        return result

    def _first_iterators(self, provider: Any) -> Any:
        self._providers.append(provider)
        count = len(self._datasets)
        result = self._build_iterators(provider)
        if len(self._datasets) == count:
            self._datasets.append(None)  # this rank reads no data
        return result

    def _keep_datasets(self, provider: Any, *sizes: Any) -> Any:
        datasets = self._build_datasets(provider, *sizes)
        self._datasets.append(datasets)
        return datasets

    # ---- after a restore -----------------------------------------------------------------------------

    def _wind_back(self, config: Any, fields: dict[str, Any]) -> None:
        """Leave everything as `train` expects it at its top. All ranks do this together."""
        training, objects = self._training, self._objects
        assert objects is not None
        args = training.get_args()
        args.iteration, args.num_floating_point_operations_so_far = self._iteration, self._flops
        for name, value in fields.items():
            setattr(config, name, value)
        for timer in training.get_timers()._timers.values():
            timer.reset()  # one that was running when the iteration was aborted
        _reset_rerun(training.get_rerun_state_machine())
        for chunk in objects.chunks:
            if chunk.use_forward_hook and not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()  # evaluation and the first iteration run without them
        objects.complete_parameters()

    def _iterators_again(self, *, is_per_chunk: bool) -> tuple[Any, Any]:
        """Data iterators at the restored number of consumed samples, over the datasets that exist."""
        training: Any = self._training
        remaining = iter(self._datasets)
        training.build_train_valid_test_datasets = lambda *_: next(remaining)
        built = []
        try:
            for provider, datasets in zip(self._providers, self._datasets, strict=True):
                built.append(self._build_iterators(provider))
                if datasets is None:
                    next(remaining)
        finally:
            training.build_train_valid_test_datasets = self._keep_datasets
        if is_per_chunk:
            return [each[0] for each in built], [each[1] for each in built]
        return built[0][0], built[0][1]


def find_problems(args: Any) -> list[str]:
    """Arguments of Megatron-LM that are refused, each with the reason."""
    problems = [
        f"--{name.replace('_', '-')} is not supported: {why}"
        for name, is_refused, why in _REFUSALS
        if is_refused(getattr(args, name, None))
    ]
    load, save = getattr(args, "load", None), getattr(args, "save", None)
    if load and load == save and not (Path(load) / _TRACKER).is_file():
        problems.append(
            f"--load {load} holds no checkpoint yet, and --save puts one there: a spare that takes over "
            "later would load it where the others have loaded nothing. Leave --load out of the first launch"
        )
    return problems


def _reset_rerun(machine: Any) -> None:
    """The rerun state machine of an aborted iteration would take the next forward for a rerun, or skip it."""
    machine.state = RerunState.NOT_RUNNING_YET
    machine.rerun_requested = machine.checkpoint_requested = False
    machine.restart_again_requested = machine.continue_requested = False
    machine.failed_validation_call = machine.initial_result = None
    machine.saved_state = machine.data_iterator_checkpoints = None
