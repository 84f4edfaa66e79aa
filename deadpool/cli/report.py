"""`--report FILE`: builds the report of a run from what the run left in its folder, and prints the timeline.

Injections are read here and nowhere in the running job. Seconds of a phase are those of the slowest host.
What cannot be written is said and ends nothing: the exit code stays the job's, which may ask to be requeued.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from deadpool.cli.rundir import (
    InjectionRecord,
    event_files,
    merge_events,
    read_digests,
    read_events,
    read_injections,
    read_workers,
    replacing,
)
from deadpool.config import Config
from deadpool.errors import ExitCode
from deadpool.events import RECOVERY_PHASES
from deadpool.report import (
    Cause,
    GenerationReport,
    InjectionReport,
    Recovery,
    Report,
    StepTimes,
    WorkerReport,
)

Event = dict[str, Any]
_SIGNALLED = {int(ExitCode.INTERRUPTED): "Ctrl-C", int(ExitCode.TERMINATED): "SIGTERM"}


def leave_reports(
    run_dir: Path, config: Config, exit_code: int, reason: str = "", *, shows_timeline: bool = True
) -> None:
    """All that a run leaves for people: the timeline on the terminal, `--events FILE` and `--report FILE`.

    Args:
        run_dir: folder of the run.
        config: its configuration.
        exit_code: of the job.
        reason: why it ended; "" if only its events say so.
        shows_timeline: False where other hosts have terminals of their own.
    """
    with _saying("events"):
        if config.run.events:
            merge_events(run_dir, Path(config.run.events))
    if not (shows_timeline or config.run.report):
        return
    with _saying("report"):
        report = build_report(run_dir, config, exit_code, reason)
        if shows_timeline and report.recoveries:
            with _saying("timeline"):
                print_timeline(report)
        if config.run.report:
            write_report(report, Path(config.run.report))
            _say_who_is_missing(report)


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        say(f"the {what} of this run could not be written: {error}")


def _say_who_is_missing(report: Report) -> None:
    if report.agents_seen < report.nnodes:
        say(
            f"this report knows the events of {report.agents_seen} of at least {report.nnodes} hosts: "
            "give all hosts one --run-dir, on a file system that they share"
        )


def say(text: str) -> None:
    """A line for people, on standard error: it may be on the full disk, too."""
    with contextlib.suppress(OSError):
        print(f"deadpool: {text}", file=sys.stderr, flush=True)


def build_report(run_dir: Path, config: Config, exit_code: int, reason: str = "") -> Report:
    """The report of a run that has ended; arguments as of `leave_reports`."""
    events = read_events(run_dir, has_every_step=False)
    injections = read_injections(run_dir)
    summaries = [event for event in events if event["event"] == "agent.summary"]
    degraded = dict.fromkeys(str(e.get("reason", "")) for e in events if e["event"] == "snapshot.degraded")
    return Report(
        job_id=config.job.job_id,
        exit_code=exit_code,
        reason=reason or _reason(events, exit_code),
        nnodes=config.job.nnodes,
        spares=config.job.spares,
        nproc_per_node=config.job.nproc_per_node,
        generations=_generations(events),
        recoveries=_recoveries(events, injections),
        injections=tuple(InjectionReport(**msgspec.structs.asdict(record)) for record in injections),
        workers=tuple(
            WorkerReport(
                rank=line.rank,
                member=line.member,
                pid=line.pid,
                generation=line.generation,
                role=line.role,
            )
            for line in read_workers(run_dir)
        ),
        protected_step=_protected_step(events),
        bytes_sent=sum(int(event.get("bytes_sent", 0)) for event in summaries),
        host_memory_bytes={e["member"]: int(e.get("host_memory_bytes", 0)) for e in summaries},
        step_times=_step_times(events),
        digests={
            str(rank): {**digests.final, **{f"blob:{name}": value for name, value in digests.blob.items()}}
            for rank, digests in sorted(read_digests(run_dir).items())
        },
        degraded=tuple(degraded),
        agents_seen=len(event_files(run_dir)),
    )


def write_report(report: Report, path: Path) -> None:
    """Write `report.json` so that a reader sees all of it or none."""
    with replacing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=1))


def read_report(path: Path) -> Report:
    """Read what `write_report` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def print_timeline(report: Report, write: Callable[[str], None] | None = None) -> None:
    """The recoveries of a run, a few lines each."""
    # Flushed here, where a full disk is noticed: at exit it would change the exit code.
    write = write or partial(print, flush=True)
    if not report.recoveries:
        write("no recovery was needed")
    for number, recovery in enumerate(report.recoveries, 1):
        for line in describe_recovery(recovery, f"recovery {number} of {len(report.recoveries)}"):
            write(line)


def describe_recovery(recovery: Recovery, title: str) -> list[str]:
    """Lines about one recovery: cause, seconds per phase, where training went on."""
    cause = recovery.cause
    who = f" of rank {', '.join(map(str, cause.ranks))}" if cause.ranks else ""
    host = f" on {cause.host}" if cause.host else ""
    lines = [f"{title}, generation {recovery.generation}: {cause.kind}{who}{host}"]
    if cause.detail:
        lines.append(f"  cause       {cause.detail.splitlines()[-1]}")
    shown = [f"{phase} {recovery.phases[phase]:.2f}" for phase in RECOVERY_PHASES if phase in recovery.phases]
    total = "" if recovery.seconds is None else f", {recovery.seconds:.2f} s since the first fault"
    if shown:
        lines.append(f"  seconds     {' + '.join(shown)}{total}")
    if not recovery.is_done:
        lines.append("  not finished: a newer generation took over")
        return lines
    lines.append(f"  went back   to step {recovery.rollback_step}, {recovery.lost_steps} steps lost")
    lines.append(f"  source      {recovery.source or 'unknown'}")
    return lines


def _generations(events: Iterable[Event]) -> tuple[GenerationReport, ...]:
    """The last published View of each generation."""
    found: dict[int, GenerationReport] = {}
    for event in events:
        if event["event"] != "view.published":
            continue
        slots = event.get("slots", ())
        found[event["generation"]] = GenerationReport(
            generation=event["generation"],
            phase=str(event.get("phase", "")),
            slots=tuple(slots.split(",") if isinstance(slots, str) else slots),
            reason=str(event.get("reason", "")),
            wall_s=event["wall_s"],
        )
    return tuple(found[generation] for generation in sorted(found))


def _recoveries(events: list[Event], injections: list[InjectionRecord]) -> tuple[Recovery, ...]:
    begun: dict[int, Event] = {}
    done: dict[int, Event] = {}
    phases: dict[int, dict[str, float]] = {}
    ran: set[int] = set()
    for event in events:
        generation = event.get("generation", 0)
        match event["event"]:
            case "recovery.begin":
                begun.setdefault(generation, event)  # a new leader may say it again
            case "recovery.done":
                done[generation] = event
            case "recovery.phase":
                slowest = phases.setdefault(generation, {})
                name = str(event.get("phase", ""))
                slowest[name] = max(slowest.get(name, 0.0), float(event.get("seconds", 0.0)))
            case "view.published" | "view.adopted" if event.get("phase") == "running":
                ran.add(generation)
            case _:
                pass
    recoveries = []
    answered_s = 0.0  # faults before this moment were dealt with by an earlier recovery
    first: Event | None = None  # began what goes on: a fault during a recovery prolongs it
    undetected_s = 0.0  # before that
    for generation in sorted(begun):
        begin, end, seconds = begun[generation], done.get(generation), None
        its_phases = phases.get(generation, {})
        struck_s = _struck_s(begin, [record for record in injections if record.wall_s > answered_s])
        if struck_s is not None:
            its_phases = {**its_phases, "detect": begin["wall_s"] - struck_s}
        if first is None:
            first, undetected_s = begin, its_phases.get("detect", 0.0)
        if end is not None:
            seconds = round(undetected_s + _between_s(first, end), 4)
            answered_s = begin["wall_s"]
        if end is not None or generation in ran:  # a leader may be lost before it says so
            first = None
        recoveries.append(_recovery(begin, end, its_phases, seconds))
    return tuple(recoveries)


def _recovery(begin: Event, done: Event | None, phases: dict[str, float], seconds: float | None) -> Recovery:
    result = done or {}
    return Recovery(
        generation=begin["generation"],
        cause=Cause(
            kind=str(begin.get("kind", "unknown")),
            ranks=tuple(begin.get("ranks", ())),
            host=str(begin.get("host", "")),
            member=str(begin.get("subject", "")),
            detail=str(begin.get("detail", begin.get("reason", ""))),
        ),
        phases={name: round(phases[name], 4) for name in RECOVERY_PHASES if name in phases},
        seconds=seconds,
        rollback_step=result.get("rollback_step"),
        rollback_generation=result.get("rollback_generation"),
        lost_steps=result.get("lost_steps"),
        source=str(result.get("source", "")),
        is_done=done is not None,
    )


def _between_s(earlier: Event, later: Event) -> float:
    """Seconds between two events: the clock of one machine says nothing on another, that of the day does."""
    clock = "monotonic_s" if earlier.get("member") == later.get("member") else "wall_s"
    return float(later[clock]) - float(earlier[clock])


def _struck_s(begin: Event, injections: list[InjectionRecord]) -> float | None:
    """When the fault happened that this recovery answers, if it was injected: the newest one before it.

    By the time of day: the victim is seldom on the leader's machine.
    """
    ranks = begin.get("ranks", ())
    moments = [
        record.wall_s
        for record in injections
        if record.kind != "bitflip"
        and record.wall_s <= begin["wall_s"]
        and (not ranks or record.rank in ranks)
    ]
    return max(moments, default=None)


def _protected_step(events: Iterable[Event]) -> int | None:
    """The step of the newest commit; a job that went back to an older checkpoint counts on from there."""
    step_of = {"snapshot.committed": "step", "recovery.done": "rollback_step"}
    names = [
        (int(event["generation"]), int(event[step_of[event["event"]]]))
        for event in events
        if event["event"] in step_of
    ]
    return max(names)[1] if names else None


def _step_times(events: Iterable[Event]) -> StepTimes | None:
    summaries = [event for event in events if event["event"] == "worker.summary"]
    if not summaries:
        return None
    return StepTimes(
        p50_s=max(float(event["step_p50_s"]) for event in summaries),
        p90_s=max(float(event["step_p90_s"]) for event in summaries),
        p99_s=max(float(event["step_p99_s"]) for event in summaries),
        max_s=max(float(event["step_max_s"]) for event in summaries),
        steps=max(int(event["steps"]) for event in summaries),
    )


def _reason(events: Iterable[Event], exit_code: int) -> str:
    """What was said last by a host that ended with this code: hosts end with codes of their own."""
    reason = _SIGNALLED.get(exit_code, "")
    for event in events:
        if event["event"] in ("run.finished", "agent.failed") and event.get("exit_code") == exit_code:
            reason = str(event.get("reason", ""))
    return reason
