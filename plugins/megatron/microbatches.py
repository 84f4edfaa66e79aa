"""The microbatches of a step, and megatron's calculator of how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import num_microbatches_calculator

_FIELDS = (
    "num_micro_batches",
    "micro_batch_size",
    "current_global_batch_size",
    "current_running_global_batch_size",
)


@dataclass(frozen=True, slots=True)
class Microbatches:
    """What one step is run with, and run again with: the number of microbatches may change between steps."""

    batches: tuple[Any, ...] | None  # None on a rank that reads no data
    calculator: dict[str, Any]

    def iterators(self, chunks: int) -> Iterator[Any] | list[Iterator[Any]] | None:
        """What a schedule takes: one iterator, or one per model chunk over the same microbatches."""
        if self.batches is None:
            return None
        return iter(self.batches) if chunks == 1 else [iter(self.batches) for _ in range(chunks)]


def draw(next_batch: Callable[[], Any] | None, count: int | None) -> Microbatches:
    """Take the microbatches of the next step.

    Args:
        next_batch: gives one; None on a rank that reads no data.
        count: how many; None: as many as the calculator says.
    """
    calculator = read_calculator()
    if next_batch is None:
        return Microbatches(None, calculator)
    wanted = num_microbatches_calculator.get_num_microbatches() if count is None else count
    return Microbatches(tuple(next_batch() for _ in range(wanted)), calculator)


def read_calculator() -> dict[str, Any]:
    """The calculator's current values; empty if the script uses none."""
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    return {} if calculator is None else {name: vars(calculator)[name] for name in _FIELDS}


def restore_calculator(stored: dict[str, Any]) -> None:
    """The inverse of `read_calculator`."""
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if calculator is not None:
        vars(calculator).update(stored)
