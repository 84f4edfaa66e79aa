"""Who calls what when ranks wait for one another in different collectives."""

from __future__ import annotations

import pytest

from deadpool.core.collectives import Call, RankCalls, find_disagreement

DATA, TENSOR, PIPE = 1, 2, 3


def call(
    group: int, sequence: int, operation: str = "allreduce", n_bytes: int = 64, *, waits: bool = True
) -> Call:
    return Call(group=group, sequence=sequence, is_waiting=waits, operation=operation, n_bytes=n_bytes)


def ranks(*calls: list[Call]) -> list[RankCalls]:
    return [RankCalls(rank=rank, calls=tuple(each)) for rank, each in enumerate(calls)]


def test_ranks_that_wait_in_the_same_call_agree() -> None:
    assert find_disagreement(ranks([call(DATA, 7)], [call(DATA, 7)])) == ()


def test_a_rank_that_is_late_disagrees_with_nobody() -> None:
    late = [call(DATA, 6, waits=False), call(TENSOR, 3, waits=False)]
    assert find_disagreement(ranks([call(DATA, 7)], late)) == ()


def test_two_calls_at_one_place_of_a_group_are_named_with_both_ranks() -> None:
    mine, theirs = call(DATA, 7, "all_gather_base", 8), call(DATA, 7, "allreduce", 4)
    assert find_disagreement(ranks([mine], [theirs], [theirs])) == ((0, mine), (1, theirs), (2, theirs))


def test_one_call_with_different_sizes_is_a_disagreement() -> None:
    assert len(find_disagreement(ranks([call(DATA, 7, n_bytes=4)], [call(DATA, 7, n_bytes=8)]))) == 2


@pytest.mark.parametrize("operation", ["gather", "scatter", "broadcast", "reduce"])
def test_a_root_may_bring_another_amount(operation: str) -> None:
    assert not find_disagreement(ranks([call(DATA, 7, operation, 8)], [call(DATA, 7, operation, 4)]))


def test_the_two_ends_of_a_line_agree_if_the_sizes_do() -> None:
    assert not find_disagreement(ranks([call(PIPE, 1, "send")], [call(PIPE, 1, "recv")]))
    assert find_disagreement(ranks([call(PIPE, 1, "send", 8)], [call(PIPE, 1, "recv", 4)]))


def test_a_rank_that_asks_alone_for_what_its_peers_remember_is_named_with_them() -> None:
    # The spare gathers once more over the tensor group; its peers went on to the data group.
    spare = [call(TENSOR, 5, "allgather"), call(DATA, 3, waits=False)]
    peer = [call(TENSOR, 4, waits=False), call(DATA, 4)]
    assert find_disagreement(ranks(spare, peer)) == ((0, spare[0]), (1, peer[1]))


def test_a_ring_over_three_groups_is_named() -> None:
    zero = [call(DATA, 1), call(PIPE, 0, waits=False)]
    one = [call(DATA, 0, waits=False), call(TENSOR, 1)]
    two = [call(TENSOR, 0, waits=False), call(PIPE, 1)]
    assert [rank for rank, _ in find_disagreement(ranks(zero, one, two))] == [0, 1, 2]


def test_a_chain_that_ends_at_a_rank_outside_of_any_collective_is_no_ring() -> None:
    zero = [call(DATA, 1)]
    one = [call(DATA, 0, waits=False), call(TENSOR, 1)]
    two = [call(TENSOR, 0, waits=False)]
    assert find_disagreement(ranks(zero, one, two)) == ()


def test_a_rank_that_waits_for_a_ring_is_not_of_it() -> None:
    outside = [call(PIPE, 1)]
    zero = [call(DATA, 1), call(TENSOR, 0, waits=False), call(PIPE, 0, waits=False)]
    one = [call(DATA, 0, waits=False), call(TENSOR, 1)]
    assert [rank for rank, _ in find_disagreement(ranks(outside, zero, one))] == [1, 2]
