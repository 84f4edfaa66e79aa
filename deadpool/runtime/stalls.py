"""Workers of this host that make no progress, and what is said of them to find the culprit."""

from __future__ import annotations

import time

from deadpool.config import LivenessConfig
from deadpool.core import progress
from deadpool.core.types import MemberId, Phase, View
from deadpool.events import EventLog, boottime_s
from deadpool.liveness.progress import ProgressChange, ProgressWatch
from deadpool.runtime.messages import Stalled
from deadpool.runtime.workforce import WorkerState, Workforce

CHECK_S = 0.25


class Stalls:
    """Watches the workers' pages while they train."""

    def __init__(self, member: MemberId, config: LivenessConfig, workforce: Workforce, log: EventLog) -> None:
        self._member = member
        self._watch = ProgressWatch(config)
        self._workforce = workforce
        self._log = log
        self._next_check_s = 0.0

    def start(self, ranks: range) -> None:
        """The workers of `ranks` train from now on."""
        now_s = boottime_s()
        for rank in ranks:
            worker = self._workforce.by_rank(rank)
            if worker is not None:
                self._watch.add(rank, worker.handle.page, now_s)

    def stop(self) -> None:
        self._watch.clear()

    def check(self, view: View | None) -> bool:
        """Whether a worker of this host stalled or froze since the last look."""
        now_s = time.monotonic()
        if view is None or view.phase is not Phase.RUNNING or now_s < self._next_check_s:
            return False
        self._next_check_s = now_s + CHECK_S
        self._forget_others()
        verdicts = self._watch.check(boottime_s())
        for verdict in verdicts:
            self._log.emit(
                f"progress.{verdict.change.value}",
                generation=view.generation,
                rank=verdict.rank,
                finished_step=verdict.finished_step,
                age_s=verdict.age_s,
            )
        return any(verdict.change is not ProgressChange.RESUMED for verdict in verdicts)

    def _forget_others(self) -> None:
        """Leave out workers that do not train any more; the page of one that is gone is unmapped."""
        for rank in self._watch.ranks:
            worker = self._workforce.by_rank(rank)
            if worker is None or worker.state is not WorkerState.RUNNING:
                self._watch.remove(rank)

    def frozen(self) -> tuple[int, ...]:
        """Ranks of this host whose process is stopped."""
        self._forget_others()
        return tuple(report.rank for report in self._watch.report() if report.tick_frozen)

    def report(self, generation: int) -> Stalled:
        """What the pages say now."""
        self._forget_others()
        reports = self._watch.report()
        return Stalled(
            member=self._member,
            generation=generation,
            ranks=[report.rank for report in reports],
            tick_frozen=[report.tick_frozen for report in reports],
            finished_step=[report.finished_step for report in reports],
            is_quiet=[report.is_quiet for report in reports],
            handles=[list(report.handles) for report in reports],
        )


def ranks_of(message: Stalled) -> tuple[progress.RankProgress, ...]:
    """A stall report in the terms of the core."""
    return tuple(
        progress.RankProgress(
            rank=rank,
            tick_frozen=frozen,
            finished_step=step,
            is_quiet=is_quiet,
            handles=tuple(
                progress.HandleProgress(
                    name_hash=name, issued=issued, completed=completed, last_bytes=last_bytes
                )
                for name, issued, completed, last_bytes in handles
            ),
        )
        for rank, frozen, step, is_quiet, handles in zip(
            message.ranks,
            message.tick_frozen,
            message.finished_step,
            message.is_quiet,
            message.handles,
            strict=True,
        )
    )
