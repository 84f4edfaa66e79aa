"""What a training script calls: `init`, `wrap`, `wrap_step`, and the `ft` object that `train` receives.

    deadpool.init()                              # joins the job; instead of init_process_group
    ...
    def train(ft):
        for step in ft.steps(total_steps):       # 1..n, beginning after the restored step
            ...
    deadpool.wrap(train, model=model, optimizer=optimizer, data=loader)()

`train` may be entered again after a failure; all state it needs is in the arguments of `wrap`. Without
`deadpool run` the same script trains unprotected, and says so once.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from deadpool.errors import ConfigError
from deadpool.runtime.session import TrainingSession, open_session, session
from deadpool.runtime.state import StateKeeper
from deadpool.runtime.stepwise import StepRunner

__all__ = ["Ft", "init", "wrap", "wrap_step"]

T = TypeVar("T")

DEFAULT_TIMEOUT = datetime.timedelta(seconds=600)


def init(*, timeout: datetime.timedelta | None = None) -> None:
    """Join the job and make the default process group.

    Call it where the script would call `torch.distributed.init_process_group`, before any model is built.
    Under `deadpool run` rank and world size come from the job. Otherwise they come from the environment
    (torchrun), or the script runs as a single process; either way unprotected.

    Args:
        timeout: of a single collective; membership finds faults long before it. Default: the job's
            `communicator.collective_timeout_s`.
    """
    joined = open_session(None if timeout is None else timeout.total_seconds())
    if joined is not None or dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    effective = timeout or DEFAULT_TIMEOUT
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=effective)
    else:
        dist.init_process_group(backend, store=c10d.HashStore(), rank=0, world_size=1, timeout=effective)
    if dist.get_rank() == 0:
        print(
            "deadpool: not started by `deadpool run`: training is UNPROTECTED. "
            "Start it with `deadpool run --standalone --nnodes N --spares S SCRIPT` to protect it.",
            file=sys.stderr,
            flush=True,
        )


class Ft:
    """Handle on the run, given to `train`."""

    def __init__(self, joined: TrainingSession | None) -> None:
        self._session = joined
        self._step = 0

    @property
    def rank(self) -> int:
        """Logical rank of this process. It never changes."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def generation(self) -> int:
        """Generation under which this process trains now; +1 at each recovery attempt."""
        return self._session.generation if self._session else 0

    @property
    def step(self) -> int:
        """Newest finished step (0 before the first)."""
        return self._session.step if self._session else self._step

    @property
    def rehearsing(self) -> bool:
        """True while a spare replays recorded steps. Always False: `wrap` never runs `train` on a spare."""
        return False

    def steps(self, total: int) -> Iterator[int]:
        """Yield step numbers up to `total`, beginning after the restored step.

        The body of the loop is one step; its end is the boundary at which the step counts and is captured.
        """
        if total < 0:
            raise ConfigError([f"ft.steps({total}): the number of steps must not be negative"])
        joined = self._session
        if joined is None:
            for step in range(1, total + 1):
                yield step
                self._step = step
            return
        while joined.step < total:
            yield joined.begin_step()
            joined.end_step()

    def record(self, **values: torch.Tensor | float) -> None:
        """Keep values of this step, bit for bit. They count only after the step's boundary."""
        if self._session is not None:
            self._session.record(values)

    def check(self) -> None:
        """Wait for the device and raise if this generation was closed: put it before a side effect."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._session is not None:
            self._session.check_open()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Declare a section in which this rank makes no step for long; progress is not judged in it."""
        if self._session is None:
            yield
            return
        with self._session.quiet():
            yield


def wrap(
    train: Callable[[Ft], T], *, model: Any = None, optimizer: Any = None, data: Any = None, **state: Any
) -> Callable[[], T]:
    """Protect a training function.

    Args:
        train: called as `train(ft)`; it may be entered again after a failure.
        model: a module, or a list of modules (plain, DDP or FSDP2). None when a framework's object that a
            plugin knows (`engine=`) holds it.
        optimizer: an optimizer, or a list.
        data: anything with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader), or None
            when the data is a function of the step.
        **state: further objects with `state_dict` and `load_state_dict` (scheduler, scaler, sampler, ...).

    Returns:
        A function without arguments. It returns what `train` returned, once ALL ranks have finished.

    Raises:
        ConfigError: some state cannot be protected; every problem is listed.
        IntegrationError: an object of an unsupported kind or version.
    """

    @functools.wraps(train)
    def run() -> T:
        keeper = StateKeeper({"model": model, "optimizer": optimizer, "data": data, **state})
        joined = session()
        if joined is None:
            return train(Ft(None))
        return joined.run(keeper, lambda: train(Ft(joined)))

    return run


def wrap_step(
    step: Callable[..., T], *, model: Any = None, optimizer: Any = None, data: Any = None, **state: Any
) -> StepRunner[T]:
    """Protect a loop that is not ours: the unit is one call of `step`.

    The returned object is called like `step`. With `data` it owns the iterator, and calls
    `step(batch, *args, **kwargs)`. After a failure it runs the steps since the rollback step again by
    itself, from the inputs it kept, so that the caller's counters stay right. It is a context manager;
    leaving it waits until all ranks have finished.

    Args:
        step: one training step, ending with the optimizer's step.
        model, optimizer, data, **state: as for `wrap`.
    """
    keeper = StateKeeper({"model": model, "optimizer": optimizer, "data": data, **state})
    return StepRunner(step, session(), keeper, data)
