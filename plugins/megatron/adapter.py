"""Megatron's state, as `wrap` captures and restores it.

Masters and moments are one buffer per optimizer: unique to a rank with the distributed optimizer, otherwise
the same over the data-parallel group. The model's parameters are not stored: they are cast from the masters
at a restore, and gathered as the next step begins. The gradient scaler's scale is a tensor that changes
outside of the inner optimizer, so it is copied at the boundary. Everything else is plain values in the blob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import nn

from deadpool.errors import ConfigError, LayoutMismatch
from deadpool.plugins.megatron.arena import Arena
from deadpool.plugins.megatron.microbatches import read_calculator, restore_calculator
from deadpool.plugins.megatron.objects import MegatronObjects, inner_params, is_sharded, replica_ranks
from deadpool.plugins.megatron.refusals import find_problems
from deadpool.plugins.megatron.reset import reset_after_abort
from deadpool.plugins.megatron.structure import read_caches, restore_caches
from deadpool.snapshot.adapter import StateAdapter, register_adapter
from deadpool.snapshot.tensors import NamedTensor

_SCALER_FIELDS = ("_growth_tracker", "_hysteresis_tracker")


class MegatronAdapter(StateAdapter):
    """The state of one rank; made by `wrap` from a MegatronObjects.

    Raises:
        ConfigError: lists everything that cannot be protected.
    """

    def __init__(self, name: str, objects: MegatronObjects) -> None:
        problems = find_problems(objects)
        if problems:
            raise ConfigError([f"{name}: {problem}" for problem in problems])
        self._name = name
        self._objects = objects
        self._arenas = [Arena(inner_params(part), part.optimizer.state) for part in objects.parts]

    def tensors(self) -> Sequence[NamedTensor]:
        found: list[NamedTensor] = []
        for index, (part, arena) in enumerate(zip(self._objects.parts, self._arenas, strict=True)):
            found.append(
                NamedTensor(
                    name=f"{self._name}.optimizer{index}",
                    resolve=lambda arena=arena: arena.flat,  # type: ignore[misc]  # bound early
                    at_boundary=False,
                    ranks=() if is_sharded(part) else replica_ranks(self._objects.chunks),
                )
            )
        for index, scaler in enumerate(self._scalers()):
            found.append(
                NamedTensor(
                    name=f"{self._name}.scale{index}",
                    resolve=lambda scaler=scaler: scaler._scale,  # type: ignore[misc]  # update() replaces it
                    at_boundary=True,
                )
            )
        return found

    def modules(self) -> Sequence[tuple[str, nn.Module]]:
        return [(f"{self._name}.chunk{index}", chunk) for index, chunk in enumerate(self._objects.chunks)]

    def optimizers(self) -> Sequence[tuple[str, torch.optim.Optimizer]]:
        return [
            (f"{self._name}.optimizer{index}", part.optimizer)
            for index, part in enumerate(self._objects.parts)
        ]

    def why_not_now(self, *, has_stepped: bool) -> str | None:
        for index, arena in enumerate(self._arenas):
            moved = arena.moved_tensor()
            if moved is not None:
                raise LayoutMismatch(
                    f"{self._name}.optimizer{index}: the {moved} was moved to other memory since wrap; load "
                    "checkpoints before it"
                )
        return None

    def read(self) -> Mapping[str, object]:
        objects = self._objects
        return {
            "steps": [arena.read_steps() for arena in self._arenas],
            "scalers": [
                {name: vars(scaler)[name] for name in _SCALER_FIELDS if name in vars(scaler)}
                for scaler in self._scalers()
            ],
            "scheduler": None if objects.scheduler is None else objects.scheduler.num_steps,
            "microbatches": read_calculator(),
            "generators": get_cuda_rng_tracker().get_states(),
            "caches": read_caches(objects),
        }

    def reset(self) -> None:
        reset_after_abort(self._objects)

    @torch.no_grad()
    def restore(self, stored: Mapping[str, Any]) -> None:
        objects = self._objects
        for arena, steps in zip(self._arenas, stored["steps"], strict=True):
            arena.restore_steps(steps)
        for scaler, values in zip(self._scalers(), stored["scalers"], strict=True):
            vars(scaler).update(values)
        if objects.scheduler is not None:
            objects.scheduler.num_steps = stored["scheduler"]
        restore_calculator(stored["microbatches"])
        if stored["generators"]:
            get_cuda_rng_tracker().set_states(dict(stored["generators"]))
        restore_caches(objects, stored["caches"])
        for part in objects.parts:
            cast = getattr(part, "_copy_main_params_to_model_params", None)
            if cast is not None:  # with 32-bit parameters and no shards the masters are the parameters
                cast()
            objects.needs_gather |= is_sharded(part)

    def _scalers(self) -> list[Any]:
        """The gradient scalers; optimizers of one chain may share one."""
        found = [getattr(part, "grad_scaler", None) for part in self._objects.parts]
        return list({id(scaler): scaler for scaler in found if scaler is not None}.values())


register_adapter(MegatronObjects, MegatronAdapter)
