"""Who keeps the others waiting."""

from __future__ import annotations

from deadpool.core.progress import HandleProgress, RankProgress, find_culprits


def rank(
    number: int, *handles: tuple[int, int, int], frozen: bool = False, quiet: bool = False
) -> RankProgress:
    progress = tuple(HandleProgress(name_hash=h, issued=i, completed=c) for h, i, c in handles)
    return RankProgress(rank=number, tick_frozen=frozen, finished_step=1, handles=progress, is_quiet=quiet)


def test_the_rank_that_has_not_issued_what_others_wait_for_is_named() -> None:
    assert find_culprits([rank(0, (1, 7, 6)), rank(1, (1, 6, 6)), rank(2, (1, 7, 6))]) == (1,)


def test_a_spinning_rank_is_named_although_it_ticks() -> None:
    assert find_culprits([rank(0, (1, 7, 6)), rank(1, (1, 5, 5), frozen=False)]) == (1,)


def test_blame_goes_down_a_chain_of_groups_to_its_end() -> None:
    tensor, pipeline = 1, 2
    reports = [
        rank(0, (tensor, 4, 3)),  # waits for 1, which waits for 2
        rank(1, (tensor, 3, 3), (pipeline, 9, 8)),
        rank(2, (pipeline, 8, 8)),
    ]
    assert find_culprits(reports) == (2,)


def test_outstanding_collectives_that_everybody_issued_excuse_nobody() -> None:
    # Rank 1 was stopped between two buckets: its own two are under way and it will never issue the third.
    reports = [rank(0, (1, 3, 0)), rank(1, (1, 2, 0), frozen=True), rank(2, (1, 3, 0))]
    assert find_culprits(reports) == (1,)


def test_all_equal_and_one_stopped_names_the_stopped() -> None:
    assert find_culprits([rank(0, (1, 7, 6)), rank(1, (1, 7, 6), frozen=True)]) == (1,)


def test_all_equal_and_all_alive_names_nobody() -> None:
    assert find_culprits([rank(0, (1, 7, 6)), rank(1, (1, 7, 6))]) == ()


def test_nobody_is_named_while_nobody_waits() -> None:
    assert find_culprits([rank(0, (1, 6, 6)), rank(1, (1, 5, 5), frozen=True)]) == ()


def test_ranks_that_lag_behind_a_stopped_one_are_not_named() -> None:
    reports = [rank(0, (1, 9, 8)), rank(1, (1, 8, 8)), rank(2, (1, 7, 7), frozen=True)]
    assert find_culprits(reports) == (2,)


def test_in_a_pipeline_the_stage_that_computes_for_ever_is_named() -> None:
    # Counted per line from rank to rank: the first stage issues half as many calls as the second.
    forward_01, back_10, forward_12, back_21 = 1, 2, 3, 4
    reports = [
        rank(0, (forward_01, 8, 8), (back_10, 8, 7)),  # waits for the gradient of stage 1
        rank(1, (forward_01, 8, 8), (back_10, 7, 7), (forward_12, 8, 8), (back_21, 8, 8)),
        rank(2, (forward_12, 9, 8), (back_21, 8, 8)),  # waits for the next input from stage 1
    ]
    assert find_culprits(reports) == (1,)


def test_no_reports_name_nobody() -> None:
    assert find_culprits([]) == ()


def test_nobody_is_named_while_the_end_of_the_chain_is_quiet_on_purpose() -> None:
    tensor, pipeline = 1, 2
    reports = [
        rank(0, (tensor, 3, 3), quiet=True),  # writes a file; 1 waits for it, and 2 for 1
        rank(1, (tensor, 4, 3), (pipeline, 8, 8)),
        rank(2, (pipeline, 9, 8)),
    ]
    assert find_culprits(reports) == ()


def test_a_stopped_process_is_named_although_another_rank_is_quiet() -> None:
    reports = [rank(0, (1, 7, 6)), rank(1, (1, 6, 6), quiet=True), rank(2, (1, 6, 6), frozen=True)]
    assert find_culprits(reports) == (2,)
