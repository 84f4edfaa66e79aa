"""Rank sets as integers."""

from __future__ import annotations

import pytest

from deadpool.core import bitset


def test_full_holds_exactly_the_first_members() -> None:
    assert list(bitset.items(bitset.full(5))) == [0, 1, 2, 3, 4]
    assert bitset.full(0) == 0


@pytest.mark.parametrize("members", [(), (0,), (3,), (0, 2, 64, 9_999)])
def test_a_set_gives_back_its_members_in_order(members: tuple[int, ...]) -> None:
    assert tuple(bitset.items(bitset.of(members))) == members


def test_has_tells_members_from_others() -> None:
    assert bitset.has(bitset.of([4]), 4)
    assert not bitset.has(bitset.of([4]), 3)
