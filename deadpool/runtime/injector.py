"""Carries out, in the victim itself, the faults that were asked for on the command line.

Costs nothing when no injection concerns this rank: the hooks are installed only in the step that needs them.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deadpool.core.types import Name
from deadpool.testing.faults import Injection, InjectionPlan, Point, carry_out, parse_injections

if TYPE_CHECKING:
    from deadpool.runtime.session import TrainingSession
    from deadpool.runtime.state import StateKeeper
    from deadpool.runtime.worker import WorkerProcess

IN_OPTIMIZER_OPERATION = 3  # the fault falls before the third in-place operation of the optimizer's step
REPLICATION_WAIT_S = 5.0  # a step whose replication does not begin by then is not replicated any more


class Injector:
    """The injections that concern one rank."""

    def __init__(self, worker: WorkerProcess, rank: int) -> None:
        injections = parse_injections(worker.config.run.inject, worker.config.world_size)
        self._plan = InjectionPlan(injections, rank, worker.run_dir)
        self._agent_pid = os.getppid()
        self._session: TrainingSession | None = None
        self._state: StateKeeper | None = None
        self._mode: _FaultInOptimizer | None = None

    def bind(self, session: TrainingSession, state: StateKeeper) -> None:
        if self._plan.is_empty:
            return
        self._session = session
        self._state = state
        for module in state.modules():
            module.register_forward_pre_hook(self._before_forward)
        for optimizer in state.optimizers():
            optimizer.register_step_pre_hook(self._before_optimizer)
            optimizer.register_step_post_hook(self._after_optimizer)

    def begin_step(self, step: int) -> None:
        if self._plan.is_empty or self._session is None:
            return
        wanted = self._plan.collectives(step)
        if wanted:
            self._session.communicators.before_call(self._count_collectives(step))

    def end_step(self, step: int) -> None:
        if not self._plan.is_empty and self._session is not None:
            self._session.communicators.before_call(None)

    def on_captured(self, name: Name, bank: int) -> None:
        """Capture thread, the bank is complete but nobody was told yet."""
        if self._plan.is_empty or self._session is None:
            return
        self._strike(self._plan.due(name.step, Point.CAPTURE))
        injection = self._plan.due(name.step, Point.REPLICATION)
        if injection is not None:
            watcher = threading.Thread(
                target=self._strike_when_sent, args=(injection, bank), name="deadpool-injection", daemon=True
            )
            watcher.start()

    def _strike_when_sent(self, injection: Injection, bank: int) -> None:
        assert self._session is not None
        deadline = time.monotonic() + REPLICATION_WAIT_S
        while self._session.sent_bytes(bank) == 0 and time.monotonic() < deadline:
            os.sched_yield()
        self._strike(injection)

    def _count_collectives(self, step: int) -> Any:
        def before_call(handle: str, operation: str, index: int) -> None:
            self._strike(self._plan.due(step, Point.COLLECTIVE, index + 1))

        return before_call

    def _current_step(self) -> int:
        assert self._session is not None
        return self._session.step + 1

    def _before_forward(self, module: Any, arguments: Any) -> None:
        self._strike(self._plan.due(self._current_step(), Point.BEFORE_FORWARD))

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self._current_step()
        self._strike(self._plan.due(step, Point.BEFORE_OPTIMIZER))
        injection = self._plan.due(step, Point.IN_OPTIMIZER)
        if injection is not None:
            self._mode = _FaultInOptimizer(lambda: self._strike(injection))
            self._mode.__enter__()  # type: ignore[no-untyped-call] # torch's modes are untyped

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None
        self._strike(self._plan.due(self._current_step(), Point.AFTER_OPTIMIZER))

    def _strike(self, injection: Injection | None) -> None:
        if injection is not None:
            carry_out(injection, self._agent_pid, flip_bit=self._flip_bit)

    def _flip_bit(self) -> None:
        """Change the lowest bit of the first element of the first parameter."""
        assert self._state is not None
        tensor = self._state.named_tensors()[0][1].detach()
        raw = tensor.reshape(-1).view(torch.uint8)
        raw[0] ^= 1


class _FaultInOptimizer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `strike` before the n-th in-place operation of an optimizer's step."""

    def __init__(self, strike: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._strike = strike
        self._left = IN_OPTIMIZER_OPERATION

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_." in str(func) or str(func).rstrip("default.").endswith("_"):
            self._left -= 1
            if self._left == 0:
                self._strike()
        return func(*args, **(kwargs or {}))
