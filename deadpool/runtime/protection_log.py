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
        save: writes a checkpoint of a committed step; gets its number, too.
        generation: the generation this agent is in.
    """

    def __init__(
        self,
        log: EventLog,
        checkpoint_every: int,
        save: Callable[[Name, int], None],
        generation: Callable[[], int],
    ) -> None:
        self.degraded: tuple[str, ...] = ()  # reasons since the last committed step
        self._log = log
        self._every = checkpoint_every
        self._save = save
        self._generation = generation
        self._saved_step = 0
        self._committed: Name | None = None
        self._said: set[str] = set()  # what is in `degraded`, without the numbers that change each time
        self._refusal = ""  # the newest one since the last committed step

    def committed(self, name: Name) -> None:
        """Every rank is protected up to this step."""
        self._log.emit("snapshot.committed", generation=self._generation(), step=name.step)
        self._committed = name
        self._refusal = ""
        if self.degraded:
            self.degraded = ()
            self._said.clear()
            self._log.emit("snapshot.protected", generation=self._generation(), step=name.step)
        if self._every and name.step // self._every > self._saved_step // self._every:
            self._saved_step = name.step
            self._save(name, name.step // self._every)

    def refused(self, rank: int, step: int, why: str, is_lasting: bool) -> None:
        """A named step will not be committed. Usual while steps are shorter than replication, if it passes.

        If it lasts, every later step is refused, too: that is shown until a step is committed again.
        """
        self._log.emit("snapshot.refused", generation=self._generation(), rank=rank, step=step, reason=why)
        self._refusal = f"rank {rank} refused step {step}: {why}"
        if is_lasting:
            reason = f"rank {rank} cannot be captured since step {step}: {why}"
            self._degrade(f"rank {rank}", f"{_tell_end(self._committed)}: {reason}", rank=rank, step=step)

    def failed(self, rank: int, step: int, why: str) -> None:
        """A copy could not be delivered: not usual, and shown until a step is committed again."""
        reason = f"copies of rank {rank} do not reach their holder: {why}"
        self._degrade(reason, reason, rank=rank, step=step)

    def unprotected(self, protected: Name | None, step: int, behind_s: float, is_first: bool) -> None:
        """Steps are finished and none is committed, whatever the cause; `step` is the newest finished one.

        One host speaks for all, and every other that has refused a step, since it may know the cause.
        """
        if self.degraded or not (is_first or self._refusal):
            return
        cause = self._refusal or "see snapshot.refused in the events of all hosts"
        self._degrade("late", f"{_tell_end(protected)}, for {behind_s:.0f} s of training: {cause}", step=step)

    def _degrade(self, key: str, reason: str, **fields: int) -> None:
        if key in self._said:
            return  # said before, and again would be a line each step
        self._said.add(key)
        self.degraded = (*self.degraded, reason)
        self._log.emit("snapshot.degraded", generation=self._generation(), reason=reason, **fields)


def _tell_end(protected: Name | None) -> str:
    return "no step is protected" if protected is None else f"no step after {protected.step} is protected"
