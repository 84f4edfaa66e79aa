"""Ranks of a replicated group that built different states are told apart before training."""

from __future__ import annotations

import pytest

from deadpool.errors import LayoutMismatch
from deadpool.snapshot.agreement import (
    Ranks,
    describe_buffers,
    digest_groups,
    find_unlike_groups,
    refuse_unlike,
)
from deadpool.snapshot.layout import Layout, TensorSpec, plan_layout


def layout(*buffers: tuple[str, int, Ranks]) -> Layout:
    return plan_layout(
        [
            TensorSpec(name=name, dtype="float32", shape=(length,), nbytes=4 * length, ranks=ranks)
            for name, length, ranks in buffers
        ]
    )


def refusal(layouts: dict[int, Layout]) -> str:
    unlike = find_unlike_groups({rank: digest_groups(each) for rank, each in layouts.items()})
    assert unlike
    with pytest.raises(LayoutMismatch) as error:
        refuse_unlike(unlike, {rank: describe_buffers(each, unlike) for rank, each in layouts.items()})
    return str(error.value)


def test_equal_states_and_states_of_other_groups_pass() -> None:
    first, second = layout(("a", 4, (0, 1)), ("own", 1, ())), layout(("b", 9, (2, 3)), ("own", 7, ()))
    layouts = {0: first, 1: first, 2: second, 3: second}
    assert find_unlike_groups({rank: digest_groups(each) for rank, each in layouts.items()}) == ()


def test_another_shape_names_the_buffer_and_the_rank_that_is_alone() -> None:
    usual, odd = layout(("w", 4, (0, 1, 2))), layout(("w", 5, (0, 1, 2)))
    text = refusal({0: usual, 1: usual, 2: odd})
    assert "w: float32 [5] on rank 2, float32 [4] on the others" in text


def test_a_buffer_that_one_rank_does_not_have_is_named() -> None:
    text = refusal(
        {0: layout(("w", 4, (0, 1)), ("momentum", 4, (0, 1))), 1: layout(("w", 4, (0, 1)))},
    )
    assert "momentum: nothing on rank 1, float32 [4] on the others" in text


def test_another_order_is_refused_too_because_copies_are_fetched_by_place() -> None:
    a, b = ("a", 4, (0, 1)), ("b", 4, (0, 1))
    text = refusal({0: layout(a, b), 1: layout(b, a)})
    assert "ranks 0, 1 built the same buffers in different orders" in text


def test_many_differences_are_counted() -> None:
    many = layout(*((f"w{index}", 4, (0, 1)) for index in range(12)))
    assert "and 7 more" in refusal({0: many, 1: layout()})
