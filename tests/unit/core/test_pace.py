"""Hosts that decide alone still write the same checkpoints."""

from __future__ import annotations

import random

import pytest

from deadpool.core.pace import CALM, LONGEST_STRIDE, WRITES_AT_ONCE, Pace, choose


def written_by(host: int, count: int, shortest: float, longest: float) -> set[int]:
    """Checkpoints that a host writes, of which each takes so many intervals."""
    chance, pace, ends, written = random.Random(host), Pace(), [0.0], set()
    for index in range(1, count + 1):
        ends = [end for end in ends if end > index]
        assert len(ends) <= WRITES_AT_ONCE
        pace, is_written = choose(pace, index, len(ends))
        if is_written:
            written.add(index)
            ends.append(index + chance.uniform(shortest, longest))
    return written


@pytest.mark.parametrize(
    ("shortest", "longest", "least"), [(0.3, 0.6, 400), (1.8, 2.3, 150), (2.5, 3.5, 150), (6.0, 9.0, 12)]
)
def test_checkpoints_complete_however_slow_the_storage_is(
    shortest: float, longest: float, least: int
) -> None:
    common = set.intersection(*(written_by(host, 400, shortest, longest) for host in range(64)))
    assert len(common) >= least
    assert max(common) > 350 - LONGEST_STRIDE


def test_a_storage_that_is_fast_again_gets_every_checkpoint_again() -> None:
    pace = Pace(stride=4)
    for index in range(4, 4 + 4 * CALM, 4):
        pace, is_written = choose(pace, index, 0)
        assert is_written
    assert pace.stride == 2
    for index in range(100, 100 + 2 * CALM, 2):
        pace, _ = choose(pace, index, 0)
    assert pace.stride == 1


def test_of_a_storage_that_hangs_nothing_more_is_asked() -> None:
    pace, n_written = Pace(), 0
    for index in range(1, 1000):
        pace, is_written = choose(pace, index, min(n_written, WRITES_AT_ONCE))
        n_written += is_written
    assert n_written == WRITES_AT_ONCE
