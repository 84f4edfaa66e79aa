"""Which slots hold the copies of which."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool.core.placement import held_slots, holders, place, replicated_is_safe
from deadpool.core.types import Phase, View


def test_without_labels_the_next_slot_holds() -> None:
    assert [holders(slot, 4) for slot in range(4)] == [(1,), (2,), (3,), (0,)]


def test_two_holders_are_the_next_two_slots() -> None:
    assert holders(2, 4, r=2) == (3, 0)


def test_a_single_slot_has_no_holder() -> None:
    assert holders(0, 1) == ()


def test_fewer_hosts_than_replicas_give_fewer_holders() -> None:
    assert holders(0, 2, r=3) == (1,)


def test_neighbours_in_one_rack_spread_over_the_other_rack() -> None:
    placement = place(6, ["A", "A", "A", "B", "B", "B"])
    assert placement == ((3,), (4,), (5,), (0,), (1,), (2,))


def test_racks_of_unequal_size_are_never_crossed_by_a_copy_within() -> None:
    domains = ["A", "A", "B"]
    placement = place(3, domains)
    assert all(domains[holder] != domains[slot] for slot, entry in enumerate(placement) for holder in entry)


def test_one_rack_for_all_still_puts_copies_on_another_host() -> None:
    assert all(slot not in entry and entry for slot, entry in enumerate(place(3, ["A", "A", "A"])))


def test_a_promoted_member_in_another_rack_changes_nothing_while_the_rule_holds() -> None:
    before = place(4, ["A", "B", "A", "B"])
    assert place(4, ["C", "B", "A", "B"], current=before) == before


def test_only_the_slots_whose_rule_broke_get_new_holders() -> None:
    before = place(4, ["A", "B", "C", "D"])
    after = place(4, ["A", "A", "C", "D"], current=before)
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_where_nothing_better_exists_copies_stay_where_they_are() -> None:
    before = ((2,), (0,), (1,))
    assert place(3, ["A", "A", "A"], current=before) == before


def test_what_a_member_holds_follows_its_slot() -> None:
    view = View(generation=1, phase=Phase.RUNNING, slots=("a", "b", "c"), nproc=1, holders=place(3))
    assert held_slots(view, "b") == (0,)
    assert held_slots(view, "spare") == ()


@pytest.mark.parametrize(
    ("ranks", "domains", "r", "safe"),
    [
        ((0, 1), ["", ""], 1, False),  # both ranks on the first host
        ((0, 2), ["", ""], 1, True),
        ((0, 2), ["A", "A"], 1, False),
        ((0, 2, 4), ["A", "B", "A"], 2, False),
        ((0, 2, 4), ["A", "B", "C"], 2, True),
    ],
)
def test_replicated_bytes_are_safe_if_they_span_enough_domains(
    ranks: tuple[int, ...], domains: list[str], r: int, safe: bool
) -> None:
    assert replicated_is_safe(ranks, 2, domains, r) is safe


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    domains=st.lists(st.sampled_from(["", "A", "B", "C"]), min_size=1, max_size=9),
    r=st.integers(1, 3),
    change=st.tuples(st.integers(0, 8), st.sampled_from(["", "A", "B", "C"])),
)
def test_every_placement_names_enough_other_slots_and_keeps_copies_if_it_can(
    domains: list[str], r: int, change: tuple[int, str]
) -> None:
    n_slots = len(domains)
    before = place(n_slots, domains, r)
    for slot, entry in enumerate(before):
        assert len(set(entry) - {slot}) == min(r, n_slots - 1)
    assert place(n_slots, domains, r, before) == before
    domains[change[0] % n_slots] = change[1]
    after = place(n_slots, domains, r, before)
    for slot, entry in enumerate(after):
        assert len(set(entry) - {slot}) == min(r, n_slots - 1)


def test_a_thousand_hosts_in_racks_give_each_host_one_other_to_hold() -> None:
    domains = [f"rack {slot // 32}" for slot in range(1250)]
    load = Counter(holder for entry in place(1250, domains) for holder in entry)
    assert max(load.values()) <= 2
