"""What an operator hears of a View, and of waits that take long."""

from __future__ import annotations

import time

from deadpool.config import Config
from deadpool.core.types import Phase, View
from deadpool.events import EventLog
from deadpool.runtime.workforce import WorkerState, Workforce
from deadpool.words import listed

FIRST_SAY_S = 10.0
SAY_AGAIN_S = 30.0


class LongWaits:
    """One line after ten seconds in a phase, then every thirty. On the agent's main thread."""

    def __init__(self, config: Config, log: EventLog, workforce: Workforce) -> None:
        self._config = config
        self._log = log
        self._workforce = workforce
        self._phase: tuple[int, Phase] | None = None
        self._since_s = time.monotonic()
        self._next_s = self._since_s + FIRST_SAY_S

    def tick(self, view: View | None, n_members: int, late_hosts: tuple[str, ...]) -> None:
        """Look again.

        Args:
            view: the View that this host obeys.
            n_members: registered hosts.
            late_hosts: for which the phase waits, as far as this host knows: the leader does.
        """
        now_s = time.monotonic()
        phase = None if view is None else (view.generation, view.phase)
        if phase != self._phase:
            self._phase, self._since_s, self._next_s = phase, now_s, now_s + FIRST_SAY_S
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAY_AGAIN_S
        what = self._describe(view, n_members)
        if what and late_hosts:
            what += f"; it waits for {listed(late_hosts)}"
        if what:
            seconds = now_s - self._since_s
            self._log.emit(
                "wait.long",
                generation=view.generation if view else 0,
                waiting_for=f"{what}, since {seconds:.0f} s",
                seconds=seconds,
            )

    def _describe(self, view: View | None, n_members: int) -> str:
        if view is None:
            return f"hosts to register ({n_members} of {self._config.job.nnodes} are here)"
        match view.phase:
            case Phase.FORMING:
                return "snapshot 0 of every rank (the scripts must reach wrap)"
            case Phase.ABORTING:
                late = [w.rank for w in self._workforce.workers if w.state is WorkerState.ABORTING]
                return f"workers to unwind to wrap (here: {late})" if late else "other hosts to abort"
            case Phase.RESTORING:
                return "every rank to restore and connect"
            case Phase.STALLED:
                limit_s = self._config.membership.spare_wait_s
                return f"a spare host (the job ends after {limit_s:g} s without one)"
        return ""


def tell_view(view: View) -> str:
    """What an operator should hear of a View: not what passes by, nor the end, which says so itself."""
    match view.phase:
        case Phase.FORMING | Phase.ABORTING | Phase.STALLED:
            return f"{view.phase.value}: {view.reason}"
        case Phase.RUNNING:
            return "running" if view.rollback is None else f"running, after step {view.rollback.step}"
        case _:
            return ""
