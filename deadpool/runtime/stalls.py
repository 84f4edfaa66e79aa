"""Workers of this host that make no progress, and what is said of them to find the culprit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import Enum

from deadpool.config import LivenessConfig
from deadpool.core import progress
from deadpool.core.collectives import Call, RankCalls
from deadpool.core.types import MemberId, Phase, View
from deadpool.events import EventLog, boottime_s
from deadpool.liveness.progress import ProgressChange, ProgressWatch
from deadpool.liveness.waiting import CollectiveWatch, decode_call
from deadpool.runtime.messages import Stalled
from deadpool.runtime.workforce import WorkerState, Workforce

CHECK_S = 0.25


class Finding(Enum):
    """What a look at the workers' pages found."""

    NOTHING = "nothing"
    WAITING = "waiting"  # one collective takes long
    LATE = "late"  # no step for too long, or a process that stands still


class Stalls:
    """Watches the workers' pages while they train."""

    def __init__(self, member: MemberId, config: LivenessConfig, workforce: Workforce, log: EventLog) -> None:
        self._member = member
        self._watch = ProgressWatch(config)
        self._calls = CollectiveWatch(config.collective_report_s)
        self._workforce = workforce
        self._log = log
        self._next_check_s = 0.0
        self._late: set[int] = set()

    @property
    def is_late(self) -> bool:
        """Whether a rank of this host does nothing for too long, or its process is stopped."""
        return bool(self._late)

    def start(self, ranks: range) -> None:
        """The workers of `ranks` train from now on."""
        now_s = boottime_s()
        for rank in ranks:
            worker = self._workforce.by_rank(rank)
            if worker is not None:
                self._watch.add(rank, worker.handle.page, now_s)
                self._calls.add(rank, worker.handle.page)

    def stop(self) -> None:
        self._late.clear()
        self._watch.clear()
        self._calls.clear()

    def check(self, view: View | None) -> Finding:
        """What is new since the last look."""
        now_s = time.monotonic()
        if view is None or view.phase is not Phase.RUNNING or now_s < self._next_check_s:
            return Finding.NOTHING
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
            if verdict.change is ProgressChange.RESUMED:
                self._late.discard(verdict.rank)
            else:
                self._late.add(verdict.rank)
        is_waiting = self._calls.check(boottime_s())
        if any(verdict.change is not ProgressChange.RESUMED for verdict in verdicts):
            return Finding.LATE
        return Finding.WAITING if is_waiting else Finding.NOTHING

    def _forget_others(self) -> None:
        """Leave out workers that do not train any more; the page of one that is gone is unmapped."""
        for rank in self._watch.ranks:
            worker = self._workforce.by_rank(rank)
            if worker is None or worker.state is not WorkerState.RUNNING:
                self._watch.remove(rank)
                self._calls.remove(rank)
                self._late.discard(rank)

    def frozen(self) -> tuple[int, ...]:
        """Ranks of this host whose process is stopped."""
        self._forget_others()
        return tuple(report.rank for report in self._watch.report() if report.tick_frozen)

    def report(self, generation: int, *, is_late: bool) -> Stalled:
        """What the pages say now."""
        self._forget_others()
        reports = self._watch.report()
        names: dict[int, str] = {}
        for report in reports:
            worker = self._workforce.by_rank(report.rank)
            known = worker.groups if worker is not None else {}
            names.update(
                {
                    name: known[name]
                    for name, issued, completed, _ in report.handles
                    if completed < issued and name in known
                }
            )
        return Stalled(
            member=self._member,
            generation=generation,
            ranks=[report.rank for report in reports],
            tick_frozen=[report.tick_frozen for report in reports],
            finished_step=[report.finished_step for report in reports],
            is_quiet=[report.is_quiet for report in reports],
            handles=[list(report.handles) for report in reports],
            names=names,
            is_late=is_late,
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
                progress.HandleProgress(name_hash=name, issued=issued, completed=completed)
                for name, issued, completed, _ in handles
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


def calls_of(message: Stalled) -> tuple[RankCalls, ...]:
    """What the ranks of a host have called, in the terms of the core."""
    return tuple(
        RankCalls(rank=rank, calls=tuple(_call(*handle) for handle in handles))
        for rank, handles in zip(message.ranks, message.handles, strict=True)
    )


def _call(group: int, issued: int, completed: int, last_call: int) -> Call:
    operation, n_bytes = decode_call(last_call)
    return Call(
        group=group,
        sequence=issued,
        is_waiting=completed < issued,
        operation=operation,
        n_bytes=n_bytes,
    )


def describe_call(rank: int, call: Call, names: Mapping[int, str]) -> str:
    """One rank's place, for people."""
    group = names.get(call.group, f"#{call.group:016x}")
    what = f"{call.operation} of {call.n_bytes} bytes"
    return f"rank {rank} waits in {what}, call {call.sequence} of group {group}"
