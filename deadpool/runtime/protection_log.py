"""What is said of protection: committed steps, and why it is weaker than configured. Also when to save."""

from __future__ import annotations

from collections.abc import Callable

from deadpool.core.types import Name
from deadpool.events import EventLog


class ProtectionLog:
    """On the agent's main thread.

    Args:
        log: event log.
        checkpoint_every: steps between checkpoints; 0: none.
        save: writes a checkpoint of a committed step.
        generation: the generation this agent is in.
    """

    def __init__(
        self,
        log: EventLog,
        checkpoint_every: int,
        save: Callable[[Name], None],
        generation: Callable[[], int],
    ) -> None:
        self.degraded: tuple[str, ...] = ()  # reasons since the last committed step
        self._log = log
        self._every = checkpoint_every
        self._save = save
        self._generation = generation
        self._saved_step = 0

    def committed(self, name: Name) -> None:
        """Every rank is protected up to this step."""
        self._log.emit("snapshot.committed", generation=self._generation(), step=name.step)
        if self.degraded:
            self.degraded = ()
            self._log.emit("snapshot.protected", generation=self._generation(), step=name.step)
        if self._every and name.step // self._every > self._saved_step // self._every:
            self._saved_step = name.step
            self._save(name)

    def refused(self, rank: int, step: int, why: str) -> None:
        """A named step will not be committed. Usual while steps are shorter than replication."""
        self._log.emit("snapshot.refused", generation=self._generation(), rank=rank, step=step, reason=why)

    def failed(self, rank: int, step: int, why: str) -> None:
        """A copy could not be delivered: not usual, and shown until a step is committed again."""
        reason = f"copies of rank {rank} do not reach their holder: {why}"
        if reason in self.degraded:
            return  # said before, and again would be a line each step
        self.degraded = (*self.degraded, reason)
        self._log.emit(
            "snapshot.degraded", generation=self._generation(), rank=rank, step=step, reason=reason
        )
