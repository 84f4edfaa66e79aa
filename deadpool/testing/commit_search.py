"""Exhaustive search of `commit_world`, and what must hold in each of its worlds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deadpool.testing.commit_world import Setup, World, claims, initial_world, moves, survivors


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a search."""

    states: int
    violation: str  # "" if none
    path: tuple[str, ...]  # to the violation
    best_commit: int
    is_exhaustive: bool
    stuck: int = 0  # states from which no later commit can be reached although steps are left


def search(
    setup: Setup,
    *,
    max_states: int = 1_000_000,
    checks_shrink: bool = True,
    checks_progress: bool = False,
) -> Verdict:
    """Visit every reachable world, breadth first, until a violation."""
    start = initial_world(setup)
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    before: dict[World, list[World]] = {}
    queue = deque([start])
    best = 0
    violation = find_violation(start)
    world = start
    while queue and not violation and len(came_from) <= max_states:
        world = queue.popleft()
        for label, after in moves(world, setup):
            if checks_progress:
                before.setdefault(after, []).append(world)
            seen = len(came_from)
            came_from.setdefault(after, (world, label))
            if len(came_from) == seen:
                continue
            violation = find_violation(after) or (find_shrink(world, after, label) if checks_shrink else "")
            best = max([best, *(claim.step for claim in claims(after))])
            if violation:
                world = after
                break
            queue.append(after)
    path: list[str] = []
    came = came_from[world] if violation else None
    while came is not None:
        path.append(came[1])
        came = came_from[came[0]]
    stuck = _count_stuck(came_from, before) if checks_progress and not violation else 0
    return Verdict(
        states=len(came_from),
        violation=violation,
        path=tuple(reversed(path)),
        best_commit=best,
        is_exhaustive=not queue,
        stuck=stuck,
    )


def find_violation(world: World) -> str:
    """What must hold and does not; "" if all holds (the oracle's invariants 3, 4 and 5)."""
    if world.phase == "TORN":
        return "a rank resumed from a torn copy"
    if world.is_claim_broken:
        return "the state is lost although the loss was claimed survivable"
    if world.phase != "RUN":
        return ""
    *after_loss, now = survivors(world)
    if now is None or now < world.rollback:
        return f"nobody died, and yet {world.rollback}, which all resumed from, is gone"
    for leader in world.leaders:
        claim = leader.value.committed
        if claim is None:
            continue
        for victim, name in enumerate(after_loss):
            if name is None or name < claim:
                return f"committed {claim}, but the loss of host {victim} leaves {name}"
    return ""


def find_shrink(before: World, after: World, label: str) -> str:
    """Losses that `before` survives and `after` does not, although nothing was lost in between."""
    if after.phase != "RUN" or before.generation != after.generation:
        return ""
    for victim, (old, new) in enumerate(zip(survivors(before), survivors(after), strict=True)):
        if old and not new:
            return f"{label}: from now on the loss of host {victim} loses the state"
    return ""


def _count_stuck(worlds: dict[World, tuple[World, str] | None], before: dict[World, list[World]]) -> int:
    """Worlds with nobody past the first step from which no later one can be committed any more."""
    good = {world for world in worlds if any(claim.step > 1 for claim in claims(world))}
    todo = list(good)
    while todo:
        for previous in before.get(todo.pop(), ()):
            if previous not in good:
                good.add(previous)
                todo.append(previous)
    return sum(
        1
        for world in worlds
        if world not in good and world.phase != "HALT" and max(rank.step for rank in world.ranks) <= 1
    )
