"""Hosts of different versions, registering in every order."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, product

import pytest

from deadpool.core.membership import Fence, LeaderElected, Limits, MemberJoined, initial_state, step
from deadpool.testing.membership_world import make_member

VERSIONS = "abc"


def right_version(order: tuple[str, ...], n_slots: int) -> str:
    """What fills all slots first; else what most have, and of equally many, what the first one has."""
    for counts in accumulate(
        order, lambda counts, version: counts + Counter(version), initial=Counter[str]()
    ):
        for version, count in counts.items():
            if count == n_slots:
                return version
    return max(Counter(order).items(), key=lambda pair: pair[1])[0]


@pytest.mark.parametrize("spares", range(4))
@pytest.mark.parametrize("n_slots", range(1, 4))
def test_whatever_the_order_no_host_is_turned_away_that_has_what_most_have(n_slots: int, spares: int) -> None:
    for order in product(VERSIONS, repeat=n_slots + spares):
        state = initial_state(Limits(spares=spares), n_slots, nproc=1)
        state, _ = step(state, LeaderElected(view=None, members=(), now_s=0.0))
        fenced = set()
        for index, version in enumerate(order):
            member = make_member(index, versions=(("torch", version),))
            state, effects = step(state, MemberJoined(member=member, now_s=0.0))
            fenced |= {effect.member_id for effect in effects if isinstance(effect, Fence)}
        right = right_version(order, n_slots)
        assert fenced == {f"m{index}" for index, version in enumerate(order) if version != right}, order
        assert (state.view is not None) == (order.count(right) >= n_slots), order
