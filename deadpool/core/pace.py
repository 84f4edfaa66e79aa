"""Which periodic checkpoints are written while the storage is slower than they come. Pure.

Each host decides alone, for it knows only its own writes, and one counts only if every host has written it.
So hosts leave out alike: of a stride s the checkpoints s, 2s, 3s and on are written, and a stride is a power
of two. Hosts with strides 2 and 4 still meet at every fourth. (Left out by need alone, 32 simulated hosts
whose writes take 2.5 to 3.5 intervals met twice in 400; so they meet 192 times.)
"""

from __future__ import annotations

from dataclasses import dataclass

WRITES_AT_ONCE = 2
LONGEST_STRIDE = 64
CALM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one host.

    Attributes:
        stride: every so manieth checkpoint is written.
        calm: so many in a row found no earlier one still being written.
    """

    stride: int = 1
    calm: int = 0


def choose(pace: Pace, index: int, n_waiting: int) -> tuple[Pace, bool]:
    """Whether to write a checkpoint.

    Args:
        pace: so far.
        index: number of the checkpoint, equal on all hosts.
        n_waiting: earlier ones that are still being written here.

    Returns:
        The pace from now on, and whether to write this one.
    """
    if index % pace.stride:
        return pace, False
    if n_waiting >= WRITES_AT_ONCE:
        return Pace(stride=min(2 * pace.stride, LONGEST_STRIDE)), False
    calm = pace.calm + 1 if n_waiting == 0 else 0
    if calm < CALM or pace.stride == 1:
        return Pace(stride=pace.stride, calm=calm), True
    return Pace(stride=pace.stride // 2), True
