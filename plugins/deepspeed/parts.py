"""What an engine's optimizer holds, by kind: which bytes are unique, replicated, or computed again.

stage 0, fp32       parameters are the masters: replicated over the data-parallel group
stage 0, bf16/fp16  fp32 masters replicated; low-precision parameters are cast from them again
stage 1, 2          own partition of the masters and its moments unique, flat; the flat low-precision
                    parameters, which hold every rank's partition, replicated: they travel to nobody
stage 3             own partition of the masters unique, flat; the low-precision one is cast from it again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.ops.adam import FusedAdam

from deadpool.plugins.deepspeed.leftovers import Entry
from deadpool.snapshot.optimizer_state import create_missing_state
from deadpool.snapshot.tensors import NamedTensor

Tensors = Sequence[torch.Tensor]

SMALL = (bool, int, float, type(None))


class OptimizerPart(ABC):
    """One kind of DeepSpeed's optimizers, bound to an engine.

    Args:
        name: of the engine in `wrap`; begins the names of all tensors.
        engine: of DeepSpeed.
    """

    leftovers: tuple[Entry, ...] = ()
    """What an aborted step leaves in the optimizer."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name = name
        self.engine = engine
        self.optimizer: Any = engine.optimizer
        self.base: torch.optim.Optimizer = self.find_base()

    def find_base(self) -> torch.optim.Optimizer:
        """The optimizer of torch that DeepSpeed drives: the only one that changes masters and moments."""
        base: torch.optim.Optimizer = self.optimizer.optimizer
        return base

    @abstractmethod
    def masters(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """The tensors that the base optimizer updates: name, tensor, ranks that hold the same bytes."""

    def replicated(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """Further tensors of the state, which ranks of a group hold alike."""
        yield from self.frozen()

    def compute_again(self) -> None:
        """Derive from the masters what is not among the tensors of the state."""
        return None

    def create_state(self) -> list[str]:
        """Create what the first step would create; returns why that cannot be done."""
        if isinstance(self.base, FusedAdam):
            create_fused_adam_state(self.base, [master for _, master, _ in self.masters()])
        return create_missing_state(f"{self.name}.optimizer", self.base)

    def scaler(self) -> Any:
        """The object that holds the loss scale, or None."""
        return getattr(self.optimizer, "loss_scaler", None)

    # ---- shared by all kinds -------------------------------------------------------------------------

    def tensors(self) -> list[NamedTensor]:
        """Masters with their optimizer state, then the rest."""
        found = []
        for label, master, ranks in self.masters():
            name = f"{self.name}.{label}"
            found.append(_named(name, _constant(master), ranks))
            state = self.base.state[master]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found.append(_named(f"{name}.{key}", _item(state, key), ranks))
        for label, tensor, ranks in self.replicated():
            found.append(_named(f"{self.name}.{label}", _constant(tensor), ranks))
        return found

    def read(self) -> dict[str, object]:
        """Small values of this boundary: numbers of the optimizer's state, and the loss scale."""
        numbers = [
            {key: value for key, value in self.base.state[master].items() if isinstance(value, SMALL)}
            for _, master, _ in self.masters()
        ]
        return {
            "numbers": numbers,
            "scaler": _small_values(self.scaler()),
            "scale": {key: getattr(self.optimizer, key) for key in self._scale_keys()},
        }

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Set what `read` returned."""
        for (_, master, _), numbers in zip(self.masters(), stored["numbers"], strict=True):
            self.base.state[master].update(numbers)
        for key, value in stored["scaler"].items():
            setattr(self.scaler(), key, value)
        for key, value in stored["scale"].items():
            setattr(self.optimizer, key, value)

    def _scale_keys(self) -> list[str]:
        keys = ("overflow", "custom_loss_scaler", "external_loss_scale")
        return [key for key in keys if isinstance(getattr(self.optimizer, key, ...), SMALL)]

    def frozen(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """Parameters that no optimizer updates: written by the constructor alone, the same on all ranks."""
        updated = {id(param) for param in self.updated()}
        ranks = ranks_of(self.engine.seq_data_parallel_group)
        for name, param in self.engine.module.named_parameters():
            if id(param) not in updated:
                yield f"module.{name}", param, ranks

    def updated(self) -> Iterable[torch.Tensor]:
        """The model's parameters that the optimizer updates."""
        return (param for param in self.engine.module.parameters() if param.requires_grad)


class PlainPart(OptimizerPart):
    """Stage 0 in fp32: the optimizer of torch itself."""

    def find_base(self) -> torch.optim.Optimizer:
        base: torch.optim.Optimizer = self.optimizer
        return base

    def updated(self) -> Iterable[torch.Tensor]:
        return (param for group in self.base.param_groups for param in group["params"])

    def masters(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        ranks = ranks_of(self.engine.seq_data_parallel_group)
        for param in self.updated():
            yield f"module.{self.engine.param_names[param]}", param, ranks


class CastPart(OptimizerPart):
    """Stage 0 in bf16 or fp16: a master for each parameter."""

    def updated(self) -> Iterable[torch.Tensor]:
        return (param for group in self.optimizer.fp16_groups for param in group)

    def masters(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        ranks = ranks_of(self.engine.seq_data_parallel_group)
        for params, masters in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                yield f"master.{self.engine.param_names[param]}", master, ranks

    def compute_again(self) -> None:
        for params, masters in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                param.data.copy_(master.data)

    def scaler(self) -> Any:
        return self.optimizer.loss_scale_config


class FlatPart(OptimizerPart):
    """Masters in flat partitions, of which every rank updates its own.

    Two attributes of DeepSpeed's optimizer are named by each kind: `partitions`, and `model_groups`, the
    model's parameters by group.
    """

    partitions: ClassVar[str]
    model_groups: ClassVar[str]

    def updated(self) -> Iterable[torch.Tensor]:
        return (param for group in getattr(self.optimizer, self.model_groups) for param in group)

    def masters(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        for index, partition in enumerate(getattr(self.optimizer, self.partitions)):
            yield f"partition{index}", partition, ()


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group."""
    return tuple(dist.get_process_group_ranks(group))


def create_fused_adam_state(optimizer: FusedAdam, masters: Iterable[torch.Tensor]) -> None:
    """What `FusedAdam.step` makes for a tensor that has no state yet."""
    for group in optimizer.param_groups:
        group.setdefault("step", 0)
    for master in masters:
        if not optimizer.state[master]:
            optimizer.state[master] = {
                "step": 0,
                "exp_avg": torch.zeros_like(master.data),
                "exp_avg_sq": torch.zeros_like(master.data),
            }


def _named(name: str, resolve: Callable[[], torch.Tensor], ranks: tuple[int, ...]) -> NamedTensor:
    return NamedTensor(name=name, resolve=resolve, at_boundary=False, ranks=ranks)


def _constant(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _item(state: dict[str, Any], key: str) -> Callable[[], torch.Tensor]:
    return lambda: state[key]


def _small_values(holder: Any) -> dict[str, object]:
    return (
        {}
        if holder is None
        else {key: value for key, value in vars(holder).items() if isinstance(value, SMALL)}
    )
