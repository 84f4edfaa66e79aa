"""Who hears nothing of whom, and when that is a death. Pure.

Two observers prove a death, since one may itself be cut off. What one alone says is no proof, but evidence
of a dead link: it tells whom to replace when collectives fail between hosts that live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from deadpool.core.types import MemberId

OBSERVERS_NEEDED = 2
"""Observers that must agree before a silence counts as death (DESIGN section 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silences:
    """What the observers say now."""

    unheard: frozenset[tuple[MemberId, MemberId]] = frozenset()  # (observer, who is not heard)
    refused: frozenset[tuple[MemberId, MemberId]] = frozenset()  # (observer, whose host has no such process)

    def say(self, observer: MemberId, silent: Iterable[MemberId], gone: Iterable[MemberId]) -> Silences:
        """An observer's word on everybody; it replaces what it said before."""

        def updated(
            words: frozenset[tuple[MemberId, MemberId]], members: Iterable[MemberId]
        ) -> frozenset[tuple[MemberId, MemberId]]:
            others = {word for word in words if word[0] != observer}
            return frozenset(others | {(observer, member) for member in members if member != observer})

        return Silences(unheard=updated(self.unheard, silent), refused=updated(self.refused, gone))

    def is_death(self, member: MemberId) -> bool:
        """Two do not hear it; or one was refused: that is the word of the host itself."""
        if any(accused == member for _, accused in self.refused):
            return True
        return sum(accused == member for _, accused in self.unheard) >= OBSERVERS_NEEDED

    def without(self, members: Collection[MemberId]) -> Silences:
        """These are gone: nothing is said of them any more, and their word counts no more."""

        def remaining(
            words: frozenset[tuple[MemberId, MemberId]],
        ) -> frozenset[tuple[MemberId, MemberId]]:
            return frozenset(word for word in words if not set(word) & set(members))

        return replace(self, unheard=remaining(self.unheard), refused=remaining(self.refused))

    def links(self, among: Collection[MemberId]) -> list[tuple[MemberId, MemberId]]:
        """(observer, unheard) where both are in `among`."""
        return sorted(word for word in self.unheard if word[0] in among and word[1] in among)


NO_SILENCES = Silences()
