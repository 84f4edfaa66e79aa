"""The adapter of a DeepSpeedEngine: its own counters and leftovers, and the part of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from deadpool.errors import ConfigError, IntegrationError
from deadpool.plugins.deepspeed.leftovers import Entry, becomes, called, clear, find_missing
from deadpool.plugins.deepspeed.parts import CastPart, OptimizerPart, PlainPart
from deadpool.plugins.deepspeed.refusals import find_problems
from deadpool.plugins.deepspeed.stage3 import Zero3Part
from deadpool.plugins.deepspeed.stage12 import Bf16Part, ZeroPart
from deadpool.snapshot.adapter import StateAdapter
from deadpool.snapshot.codec import find_unstorable
from deadpool.snapshot.tensors import NamedTensor

PARTS: tuple[tuple[type, type[OptimizerPart]], ...] = (
    (DeepSpeedZeroOptimizer_Stage3, Zero3Part),
    (DeepSpeedZeroOptimizer, ZeroPart),
    (BF16_Optimizer, Bf16Part),
    (FP16_UnfusedOptimizer, CastPart),
    (torch.optim.Optimizer, PlainPart),
)

LEFTOVERS = (
    becomes("_running_engine_step", False),
    becomes("_manual_backward_expected", False),
    becomes("module.parameters[*].grad", None),
    becomes("timers.timers[*].started_", False),
)
"""What an aborted step leaves in any engine."""

PIPELINE_LEFTOVERS = (
    becomes("_force_grad_boundary", False),
    called("reset_activation_shape"),  # a spare has not heard the shapes yet: everybody tells them again
    Entry("pipe_buffers", lambda engine, name: _empty_slots(getattr(engine, name))),
    becomes("data_iterator", None),
)

COUNTERS = (
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "_unmanaged_backward_count",
    "_step_applied",
    "_is_gradient_accumulation_boundary",
)


class EngineAdapter(StateAdapter):
    """State of one engine.

    Args:
        name: of the engine in `wrap`.
        engine: a DeepSpeedEngine or a PipelineEngine.

    Raises:
        ConfigError: it cannot be protected; lists every reason.
        IntegrationError: private attributes that a reset needs are missing in this version; names them.
    """

    def __init__(self, name: str, engine: Any) -> None:
        problems = find_problems(name, engine)
        if problems:
            raise ConfigError(problems)
        self._name = name
        self._engine = engine
        self._part = _make_part(name, engine)
        self.of_engine = LEFTOVERS + (PIPELINE_LEFTOVERS if isinstance(engine, PipelineEngine) else ())
        self.of_optimizer = self._part.leftovers
        missing = find_missing(engine, (*self.of_engine, *self.of_optimizer))
        if missing:
            raise IntegrationError(
                f"{name}: DeepSpeed {deepspeed.__version__} has no {', '.join(missing)}; "
                "the plugin was written for 0.19"
            )
        problems = self._part.create_state()
        unstorable = find_unstorable(dict(self.read()), name)
        if unstorable:
            problems.append(unstorable)
        if problems:
            raise ConfigError(problems)

    def tensors(self) -> Sequence[NamedTensor]:
        return self._part.tensors()

    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        return [(f"{self._name}.module", self._engine.module)]

    def optimizers(self) -> Sequence[tuple[str, torch.optim.Optimizer]]:
        return [(f"{self._name}.optimizer", self._part.base)]

    def why_not_now(self, *, has_stepped: bool) -> str | None:
        engine = self._engine
        carried = f"{self._name}: gradients are accumulated over this boundary"
        if engine._unmanaged_backward_count:
            return carried
        if engine.managed_gradient_accumulation() and engine._is_gradient_accumulation_boundary is None:
            return carried if engine.micro_steps % engine.gradient_accumulation_steps() else None
        return None if has_stepped else carried

    def read(self) -> Mapping[str, object]:
        scheduler = self._engine.lr_scheduler
        return {
            "counters": {key: getattr(self._engine, key) for key in COUNTERS},
            "optimizer": self._part.read(),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "last_lr": getattr(scheduler, "_last_lr", None),  # not in the state of DeepSpeed's own schedules
            "micro_offset": getattr(self._engine.module, "micro_offset", None),  # seeds a pipeline's layers
        }

    def reset(self) -> None:
        clear(self._engine, (*self.of_engine, *self.of_optimizer))

    def restore(self, stored: Mapping[str, Any]) -> None:
        for key, value in stored["counters"].items():
            setattr(self._engine, key, value)
        self._part.restore(stored["optimizer"])
        if stored["micro_offset"] is not None:
            self._engine.module.micro_offset = stored["micro_offset"]
        with torch.no_grad():
            self._part.compute_again()
        scheduler = self._engine.lr_scheduler
        if scheduler is not None:
            scheduler.load_state_dict(stored["scheduler"])
            if stored["last_lr"] is not None:
                scheduler._last_lr = stored["last_lr"]


def _make_part(name: str, engine: Any) -> OptimizerPart:
    for kind, part in PARTS:
        if isinstance(engine.optimizer, kind):
            return part(name, engine)
    wrapper = type(engine.optimizer).__qualname__
    raise ConfigError(
        [f'{name}: the optimizer {wrapper} is not covered; use ZeRO stage 1, 2 or 3, or "torch_adam": true']
    )


def _empty_slots(buffers: dict[str, list[Any]]) -> None:
    for slots in buffers.values():
        slots[:] = [None] * len(slots)
