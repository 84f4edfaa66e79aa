"""The timeline of recoveries, as the leader sees them: begin, done, and the summary that outlives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deadpool.core.types import Ack, Fault, MemberId, Phase, Source, View
from deadpool.events import EventLog


class Timeline:
    """Turns faults and published Views into `recovery.begin` and `recovery.done`.

    Args:
        log: event log.
        keep: keeps a summary where every member finds it: (generation, plain values).
    """

    def __init__(self, log: EventLog, keep: Callable[[int, dict[str, Any]], None]) -> None:
        self._log = log
        self._keep = keep
        self._cause: dict[str, Any] = {}
        self._began_s = 0.0  # 0: no recovery is under way
        self._phase_s = 0.0
        self._acks: dict[MemberId, Ack] = {}
        self._finished_step = 0  # before this recovery; an attempt that had restored goes back behind it
        self._slots: tuple[MemberId, ...] = ()  # of the View under which the job last ran

    def resume(self, view: View, ran_with: tuple[MemberId, ...], stopped_s: float) -> None:
        """This leader takes over under `view`, and goes on with the recovery that may be under way.

        Args:
            view: the View.
            ran_with: slots of the one under which this agent last saw the job run.
            stopped_s: monotonic time since when this agent has not seen the job run; 0 if it has.
        """
        self._slots = view.slots if view.phase is Phase.RUNNING else ran_with
        if view.phase in (Phase.ABORTING, Phase.RESTORING, Phase.STALLED):
            self._phase_s = time.monotonic()
            self._began_s = stopped_s or self._phase_s

    def fault(self, fault: Fault, host: str) -> None:
        """A fault was reported; the View that answers it follows."""
        self._cause = {
            "kind": fault.kind.value,
            "ranks": list(fault.ranks),
            "host": host,
            "subject": fault.member,
        }

    def lost(self, member: MemberId, host: str, how: str, ranks: tuple[int, ...]) -> None:
        """A host was lost."""
        self._cause = {"kind": how, "ranks": list(ranks), "host": host, "subject": member}

    def acked(self, ack: Ack) -> None:
        if ack.phase is Phase.ABORTING:
            self._acks[ack.member] = ack
            self._phase_s = time.monotonic()  # agreeing counts from the last ack

    def published(self, before: View | None, view: View) -> None:
        """A View was published."""
        now_s = time.monotonic()
        match view.phase:
            case Phase.ABORTING:
                self._begin(view, now_s)
            case Phase.RESTORING:
                if before is not None and before.phase is Phase.ABORTING:
                    self._log.emit(
                        "recovery.phase",
                        generation=view.generation,
                        phase="agree",
                        seconds=now_s - self._phase_s,
                    )
            case Phase.RUNNING:
                if self._began_s and view.rollback is not None:
                    self._done(view, now_s)
                self._slots = view.slots
            case _:
                pass

    def _begin(self, view: View, now_s: float) -> None:
        self._began_s = self._began_s or now_s
        self._phase_s = now_s
        self._finished_step = self._newest_finished()
        self._acks.clear()
        self._log.emit("recovery.begin", generation=view.generation, reason=view.reason, **self._cause)

    def _done(self, view: View, now_s: float) -> None:
        assert view.rollback is not None
        groups = any(ack.groups for ack in self._acks.values())
        source = "checkpoint" if view.source is Source.CHECKPOINT else "replicated" if groups else "replica"
        summary: dict[str, Any] = {
            # By what changed, not by the causes: of several in one recovery, only the last is known as such.
            "replaced": [member for member in self._slots if member and member not in view.slots],
            "source": source,
            "rollback_step": view.rollback.step,
            "rollback_generation": view.rollback.generation,
            "lost_steps": max(0, self._newest_finished() - view.rollback.step),
            "seconds": now_s - self._began_s,
        }
        self._log.emit("recovery.done", generation=view.generation, **summary)
        kept = {"reason": view.reason, **self._cause, **summary}
        self._keep(view.generation, kept)
        self._began_s = 0.0
        self._cause = {}
        self._finished_step = 0
        self._acks.clear()

    def _newest_finished(self) -> int:
        """Finished, in some attempt, on every rank that answered; the lost ranks may have finished less."""
        finished = [ack.last_step for ack in self._acks.values() if ack.last_step]
        return max(self._finished_step, min(finished, default=0))
