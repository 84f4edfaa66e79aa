"""Protection's view of the replicator: a copy is held once EVERY holder of the rank has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deadpool.core.types import MemberId, Name
from deadpool.store.replication import Replicator


class HolderPusher:
    """Sends a bank to all holders of its rank. On the agent's main thread.

    Args:
        replicator: sends to one member at a time.
        held: called with (rank, name) once all holders have it.
    """

    def __init__(self, replicator: Replicator, held: Callable[[int, Name], None]) -> None:
        self._replicator = replicator
        self._held = held
        self._waiting: dict[int, tuple[Name, int]] = {}  # rank -> what is being sent, to how many holders

    def push(self, rank: int, name: Name, bank: int, holders: Sequence[MemberId], keep: Name | None) -> None:
        """Send; with no holder (a job of one host) it counts as held: nothing protects it."""
        self._waiting[rank] = (name, len(holders))
        if not holders:
            self._held(rank, name)
        for holder in holders:
            self._replicator.push_captured(rank, name, bank, holder, keep)

    def stop(self, rank: int, bank: int) -> None:
        """Stop what reads that bank."""
        self._replicator.stop(rank, bank)

    def acked(self, rank: int, name: Name) -> None:
        """One more holder has it."""
        waiting, missing = self._waiting.get(rank, (None, 0))
        if waiting != name:
            return  # an answer to a push that was given up
        self._waiting[rank] = (name, missing - 1)
        if missing == 1:
            self._held(rank, name)
