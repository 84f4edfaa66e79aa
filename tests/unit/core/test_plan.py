"""From inventories to the step to resume from, and to what is fetched from whom."""

from __future__ import annotations

import pytest

from deadpool.core.plan import (
    NoLiveCopy,
    RankPlan,
    kept_names,
    merge_groups,
    newest_live_name,
    plan_recovery,
)
from deadpool.core.types import Ack, Inventory, Name, Phase, RankCopies, ReplicatedGroup, Source, View

OLD = Name(step=4, generation=1)
NEW = Name(step=5, generation=1)
ALL = (ReplicatedGroup(ranks=(0, 1)),)


def host(member: str, *, own: dict[int, list[Name]], held: dict[int, list[Name]] | None = None) -> Inventory:
    held = held or {}
    copies = [
        RankCopies(rank=rank, own=tuple(own.get(rank, ())), held=tuple(held.get(rank, ())))
        for rank in sorted({*own, *held})
    ]
    return Inventory(member=member, copies=tuple(copies))


def restoring(*slots: str, leaving: tuple[str, ...] = (), rollback: Name = NEW) -> View:
    return View(generation=2, phase=Phase.RESTORING, slots=slots, nproc=1, leaving=leaving, rollback=rollback)


def test_the_newest_step_of_which_all_ranks_have_a_copy_is_chosen() -> None:
    inventories = [
        host("a", own={0: [OLD, NEW]}, held={1: [OLD]}),
        host("b", own={1: [OLD, NEW]}, held={0: [OLD]}),
    ]
    assert newest_live_name(2, inventories) == NEW


def test_a_step_that_one_rank_lacks_is_not_chosen() -> None:
    inventories = [host("a", own={0: [OLD, NEW]}), host("b", own={1: [OLD]})]
    assert newest_live_name(2, inventories) == OLD


def test_a_copy_on_a_holder_stands_for_a_lost_owner() -> None:
    assert newest_live_name(2, [host("a", own={0: [NEW]}, held={1: [NEW]})]) == NEW


def test_no_step_is_chosen_if_a_rank_has_no_copy() -> None:
    assert newest_live_name(2, [host("a", own={0: [NEW]})]) is None


def test_one_step_under_two_generations_is_two_different_states() -> None:
    other = Name(step=5, generation=2)
    inventories = [host("a", own={0: [OLD, NEW]}), host("b", own={1: [OLD, other]})]
    assert newest_live_name(2, inventories) == OLD


def test_replicated_bytes_need_one_owner_of_the_group() -> None:
    only_holders = [host("a", own={}, held={0: [NEW], 1: [NEW]})]
    assert newest_live_name(2, only_holders, ALL) is None
    one_owner = [host("a", own={0: [NEW]}, held={1: [NEW]})]
    assert newest_live_name(2, one_owner, ALL) == NEW


def test_a_rank_with_its_own_copy_fetches_nothing() -> None:
    inventories = [host("a", own={0: [NEW]}), host("b", own={1: [NEW]})]
    assert plan_recovery(restoring("a", "b"), inventories, ALL) == (RankPlan(rank=0), RankPlan(rank=1))


def test_a_spare_fetches_unique_bytes_from_the_holder_and_replicated_ones_from_an_owner() -> None:
    inventories = [host("a", own={0: [NEW]}, held={1: [NEW]})]
    plan = plan_recovery(restoring("a", "s"), inventories, ALL)[1]
    assert plan == RankPlan(rank=1, unique_from="a", replicated_from=((0, 0, "a"),))


def test_a_member_that_stays_is_preferred_to_one_that_leaves() -> None:
    inventories = [
        host("a", own={0: [NEW]}, held={1: [NEW]}),
        host("Z", own={1: [NEW]}),  # leaving, and first in the alphabet
    ]
    plan = plan_recovery(restoring("a", "s", leaving=("Z",)), inventories, ALL)[1]
    assert plan == RankPlan(rank=1, unique_from="a", replicated_from=((0, 0, "a"),))


def test_a_leaving_member_is_a_source_where_there_is_no_other() -> None:
    inventories = [host("a", own={0: [NEW]}), host("z", own={1: [NEW]})]
    assert plan_recovery(restoring("a", "s", leaving=("z",)), inventories)[1].unique_from == "z"


def test_replicated_sources_are_spread_over_the_group() -> None:
    group = (ReplicatedGroup(ranks=(0, 1, 2, 3)),)
    inventories = [
        host("a", own={0: [NEW]}, held={2: [NEW]}),
        host("b", own={1: [NEW]}, held={3: [NEW]}),
    ]
    plans = plan_recovery(restoring("a", "b", "s", "t"), inventories, group)
    assert [plans[rank].replicated_from for rank in (2, 3)] == [((0, 0, "a"),), ((0, 1, "b"),)]


def test_the_order_of_inventories_and_acks_does_not_change_the_plan() -> None:
    inventories = [
        host("a", own={0: [NEW]}, held={1: [NEW]}),
        host("c", own={2: [NEW]}, held={0: [NEW], 1: [NEW]}),
    ]
    view = restoring("a", "s", "c")
    assert plan_recovery(view, inventories) == plan_recovery(view, inventories[::-1])
    groups = (ReplicatedGroup(ranks=(0, 1)), ReplicatedGroup(ranks=(2, 3)))
    acks = [
        Ack(member=str(index), generation=2, phase=Phase.ABORTING, groups=(group,))
        for index, group in enumerate(groups)
    ]
    assert merge_groups(acks) == merge_groups(acks[::-1]) == groups


def test_a_rank_without_any_copy_is_an_error_that_names_it() -> None:
    with pytest.raises(NoLiveCopy, match="rank 1"):
        plan_recovery(restoring("a", "s"), [host("a", own={0: [NEW]})])


def test_a_lost_replicated_group_is_an_error_that_names_it() -> None:
    with pytest.raises(NoLiveCopy, match="group 0"):
        plan_recovery(restoring("s", "t"), [host("a", own={}, held={0: [NEW], 1: [NEW]})], ALL)


def test_nothing_is_fetched_from_memory_if_the_checkpoint_is_the_source() -> None:
    view = View(
        generation=2,
        phase=Phase.RESTORING,
        slots=("a", "b"),
        nproc=1,
        rollback=OLD,
        source=Source.CHECKPOINT,
    )
    assert plan_recovery(view, []) == ()


def test_copies_newer_than_the_rollback_step_do_not_stay() -> None:
    again = Name(step=4, generation=2)
    inventories = [host("a", own={0: [OLD, NEW]}), host("b", own={1: [OLD, again]})]
    assert kept_names(2, inventories, OLD) == {OLD}


def test_older_copies_stay_if_every_rank_has_them() -> None:
    oldest = Name(step=3, generation=1)
    inventories = [
        host("a", own={0: [OLD, NEW]}, held={1: [oldest]}),
        host("b", own={1: [oldest, NEW]}, held={0: [oldest, OLD]}),
    ]
    assert kept_names(2, inventories, NEW) == {oldest, NEW}


def test_the_rollback_step_stays_although_it_came_from_the_checkpoint() -> None:
    assert kept_names(2, [host("a", own={0: [NEW]})], OLD) == {OLD}
