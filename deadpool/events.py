"""Every event worth a line, and the log that writes them: JSON lines to a file, chosen ones to the console.

An event is a change of phase or state, never something that happens each step, except `snapshot.committed`
and `snapshot.refused`, which go to the file only. Recovery times, `deadpool verify` and the report come out
of these files, so a name or field listed here is an interface.

`monotonic_s` is CLOCK_BOOTTIME: comparable between the processes of one machine, and it runs on while the
machine sleeps. Between machines only `wall_s` can be compared, as far as their clocks agree.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from deadpool.outlet import Outlet, print_error

logger = logging.getLogger(__name__)

Scalar = str | int | float | bool | None
FieldValue = Scalar | Sequence["FieldValue"] | Mapping[str, "FieldValue"]

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        # The run and its members
        "run.finished": "The job ended; exit_code, reason.",
        "member.registered": "This agent registered; host, granted_ttl_s.",
        "member.quarantined": "A host may not be used again; subject, reason.",
        "member.fenced": "This agent was replaced and writes nothing more; reason.",
        "store.unreachable": "The control plane does not answer; reason. Training goes on.",
        "store.reachable": "The control plane answers again; seconds it was away.",
        "leader.elected": "This agent leads; term.",
        "leader.lost": "This agent no longer leads; term.",
        "growth.begin": "No spare is left, another host is asked for; command.",
        "growth.done": "The command that brings a host has ended well.",
        "growth.failed": "No host was brought; reason. It is tried again later.",
        "view.published": "The leader published a View; phase, slots, joining, leaving, reason.",
        "view.adopted": "This agent obeys a View; phase, reason.",
        "view.told": "The same in words, if an operator should hear of it; text.",
        # Workers
        "worker.ready": "A worker is parked: imports done, self-test passed; pid, seconds.",
        "worker.rehearsed": "A parked worker built once and threw it away; seconds, problem.",
        "worker.assigned": "A worker runs the script as a rank; rank, pid, role.",
        "worker.exited": "A worker ended; rank, pid, how.",
        "worker.unreaped": "A killed worker is not reaped in time, the host is bad; rank, pid.",
        # Faults as somebody saw them
        "fault.reported": "A fault was reported; kind, ranks, subject (member), detail.",
        "liveness.suspect": "A neighbour is quiet; subject, age_s.",
        "liveness.silent": "A neighbour counts as dead for this observer; subject, age_s, observers_needed.",
        "liveness.gone": "A member's host says that its process does not exist; subject.",
        "liveness.returned": "A quiet neighbour was heard again; subject, age_s.",
        "liveness.paused": "This process itself was stopped or starved; late_s.",
        "progress.stalled": "A worker finished no step for too long; rank, finished_step, age_s.",
        "progress.frozen": "A worker's native tick stands still; rank, age_s.",
        "progress.resumed": "A stalled or frozen worker goes on; rank, finished_step.",
        "collective.disagreement": "Ranks wait for one another in different collectives; ranks, detail.",
        "progress.culprit": "Sequence numbers name the ranks that others wait for; ranks.",
        # Protection
        "snapshot.committed": "A step is complete on owner and holder of every rank; step.",
        "snapshot.refused": "A named step will not be committed; step, rank, reason.",
        "snapshot.degraded": "Protection is weaker than configured; reason.",
        "snapshot.protected": "Protection is as configured again; step.",
        "checkpoint.written": "This host's shard of a checkpoint is durable; step, bytes.",
        "checkpoint.complete": "The manifest of a checkpoint is durable; step, path.",
        # Recovery; all in the NEW generation
        "recovery.begin": "The leader opened a generation; kind, ranks, host, subject, reason.",
        "recovery.phase": "A phase of the timeline ended here; phase, seconds, rank if a worker's.",
        "recovery.done": "All run again; replaced, source, rollback_step, rollback_generation, lost_steps, "
        "seconds.",
        # Waiting, and the summary at the end
        "wait.long": "A wait takes long; waiting_for, seconds if they were counted.",
        "agent.failed": "This host cannot go on and ends; exit_code, reason.",
        "agent.summary": "At the end; bytes_sent, host_memory_bytes, protected_step.",
        "worker.summary": "At the end; rank, steps, step_p50_s, step_p90_s, step_p99_s, step_max_s.",
    }
)

FOLDER_CLOSE_S = 30.0  # how the job ended may be among what waits

RECOVERY_PHASES = ("detect", "abort", "agree", "fetch", "rebuild", "restore", "first_step")
"""Phases of a recovery's timeline, in order; `recovery.phase` names one of them."""

# One short line each; events that are not listed go to the file only. Absent fields read as "?".
_CONSOLE: Mapping[str, str] = MappingProxyType(
    {
        "run.finished": "run ends with code {exit_code}: {reason}",
        "member.quarantined": "{subject} quarantined: {reason}",
        "member.fenced": "this host was replaced: {reason}",
        "agent.failed": "this host ends with code {exit_code}: {reason}",
        "store.unreachable": "control plane unreachable: {reason}; training goes on",
        "store.reachable": "control plane answers again after {seconds:.1f} s",
        "view.told": "generation {generation} {text}",
        "worker.exited": "worker of rank {rank} (pid {pid}) {how}",
        "worker.unreaped": "worker of rank {rank} (pid {pid}) cannot be reaped: this host is bad",
        "liveness.silent": "no heartbeat from {subject} for {age_s:.1f} s (silence_dead_s)",
        "collective.disagreement": "ranks {ranks} wait for one another: {detail}",
        "liveness.gone": "{subject} is gone: its host refuses connections",
        "progress.culprit": "others wait for ranks {ranks}",
        "snapshot.degraded": "degraded: {reason}",
        "snapshot.protected": "protected again up to step {step}",
        "growth.begin": "no spare is left, asking for another host",
        "growth.failed": "no host was brought: {reason}",
        "checkpoint.complete": "checkpoint of step {step} complete: {path}",
        "recovery.done": "recovered in {seconds:.2f} s: back to step {rollback_step} ({source}), "
        "{lost_steps} steps lost",
        "wait.long": "waiting for {waiting_for}",
    }
)

_RESERVED = frozenset({"event", "run_id", "member", "monotonic_s", "wall_s"})


def boottime_s() -> float:
    """Seconds since boot, also those asleep; comparable between the processes of one machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EventLog:
    """Appends events to one file; safe to call from any thread of one process.

    A failing disk must not end a training run, so a line that cannot be written is counted, said once, and
    dropped; one that hangs is waited for a moment only. With `strict`, a name that is not in the catalogue or
    a field that is not plain JSON raises; without, it is written as text: a slip in a seldom path must not
    end a run either.

    Args:
        path: file to append to; its folder is made. None: nothing is written.
        run_id: identifies this run of the job in every line.
        member: incarnation of the agent that writes.
        console: receives the short line of chosen events; None prints nothing.
        strict: raise on unknown names and field types.
    """

    def __init__(
        self,
        path: Path | None,
        run_id: str,
        member: str,
        *,
        console: Callable[[str], None] | None = None,
        strict: bool = False,
    ) -> None:
        self._run_id = run_id
        self._member = member
        self._console = console
        self._strict = strict
        self._lost_lines = 0
        self._fd = -1
        self._folder = Outlet("run-folder")
        self._shown = Outlet("console")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written."""
        return self._lost_lines + self._folder.n_lost

    def emit(self, name: str, *, generation: int = 0, **fields: FieldValue) -> None:
        """Log one event now.

        Args:
            name: a key of `EVENTS`.
            generation: generation it belongs to; 0 before the first View.
            fields: plain values; `rank` and `step` mean the same in every event.

        Raises:
            ValueError: unknown name or reserved field (strict only).
            TypeError: a field that is not plain JSON (strict only).
        """
        if self._strict:
            _check(name, fields)
        line = {
            "event": name,
            "run_id": self._run_id,
            "member": self._member,
            "generation": generation,
            "monotonic_s": round(boottime_s(), 6),
            "wall_s": round(time.time(), 6),
            **{key: value for key, value in fields.items() if key not in _RESERVED},
        }
        if self._fd >= 0:
            self._folder.do(partial(self._write, json.dumps(line, default=str).encode() + b"\n"))
        template = _CONSOLE.get(name)
        if template is not None and self._console is not None:
            self._shown.do(partial(self._show, _format(template, {"generation": generation, **fields})))

    def say(self, text: str) -> None:
        """Print text on standard error, in its turn behind the events' lines."""
        self._shown.do(partial(print_error, text))

    def note(self, work: Callable[[], None]) -> None:
        """Do another write to the run folder, in its turn behind the events.

        Args:
            work: must not raise.
        """
        self._folder.do(work)

    def close(self) -> None:
        """Close the file; later events reach nobody."""
        self._folder.do(self._close)
        self._folder.close(FOLDER_CLOSE_S)
        self._shown.close()

    def _write(self, data: bytes) -> None:
        try:
            os.write(self._fd, data)  # one write with O_APPEND: lines of two processes never mix
        except OSError as error:
            self._lost_lines += 1
            if self._lost_lines == 1:
                logger.warning("events are being lost: %s", error)

    def _show(self, line: str) -> None:
        if self._console is not None:
            try:
                self._console(line)
            except OSError:  # a full disk, or a reader that is gone, ends no agent; the file has the event
                self._console = None

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Unknown:
    """Stands for an absent field in a console line, whatever its format."""

    def __format__(self, spec: str) -> str:
        return "?"


class _Shown(dict[str, FieldValue]):
    def __missing__(self, key: str) -> _Unknown:
        return _Unknown()


def _format(template: str, fields: Mapping[str, FieldValue]) -> str:
    try:
        return template.format_map(_Shown(fields))
    except (TypeError, ValueError):  # text where the template wants a number
        return " ".join(f"{key}={value}" for key, value in fields.items())


def _check(name: str, fields: Mapping[str, FieldValue]) -> None:
    if name not in EVENTS:
        raise ValueError(f"event {name!r} is not in the catalogue of deadpool/events.py")
    reserved = sorted(_RESERVED & fields.keys())
    if reserved:
        raise ValueError(f"event {name!r}: {reserved} are written by the log itself")
    for key, value in fields.items():
        _check_value(f"event {name!r}, field {key!r}", value)


def _check_value(where: str, value: object) -> None:
    if value is None or type(value) in (str, int, float, bool):
        return
    if isinstance(value, list | tuple):
        for item in value:
            _check_value(where, item)
        return
    if isinstance(value, dict) and all(type(key) is str for key in value):
        for item in value.values():
            _check_value(where, item)
        return
    raise TypeError(f"{where}: {type(value).__name__} is not a plain JSON value")
