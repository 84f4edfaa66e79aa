"""One run, reduced to figures.

Step time: median time between consecutive step ends of one process, which includes all that happens between
steps; only steps after WARM_STEPS and before the fault.

Recovery, in seconds after the SIGKILL: (i) the next finished step anywhere; (ii) the first step beyond the
last one finished before the fault; (iii) the first such step with two contributing ranks, new progress at
full strength.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from run import WARM_STEPS

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the undisturbed steps of one run."""

    step_s: float
    worker_cpu_s: float  # CPU seconds of one rank per step
    job_cpu_s: float | None  # of everything that was started, per step; None if it was not sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds after the SIGKILL; None where it did not happen."""

    first_s: float | None
    beyond_s: float | None
    full_s: float | None
    lost_steps: int | None
    marks: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Run:
    """One run, read and reduced."""

    folder: Path
    facts: dict[str, Any]
    events: list[Event]
    usage: list[dict[str, Any]]
    own_events: list[Event] = field(default_factory=list)  # DeadPool's

    @property
    def configuration(self) -> str:
        return str(self.facts["cfg"])

    @property
    def fault_s(self) -> float:
        """When the fault struck; infinite if it did not."""
        return next((event["t"] for event in self.events if event["ev"] == "kill"), float("inf"))

    @property
    def steps(self) -> list[Event]:
        return [event for event in self.events if event["ev"] == "step"]

    @property
    def digests(self) -> list[str]:
        return sorted({event["hash"] for event in self.events if event["ev"] == "final"})


def read_run(folder: Path) -> Run | None:
    """The run in a folder; None if there is none, or it left no events."""
    if not (folder / "run.json").exists() or not (folder / "events.jsonl").exists():
        return None
    usage = folder / "usage.json"
    own = folder / "deadpool.jsonl"
    return Run(
        folder=folder,
        facts=json.loads((folder / "run.json").read_text()),
        events=sorted(_json_lines(folder / "events.jsonl"), key=lambda event: float(event["t"])),
        usage=json.loads(usage.read_text()) if usage.exists() else [],
        own_events=_json_lines(own) if own.exists() else [],
    )


def _json_lines(path: Path) -> list[Event]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # torn: its writer was killed
            continue
    return found


# ---- step time and CPU ---------------------------------------------------------------------------------


def rates_of(run: Run) -> Rates:
    """Medians over the steps before the fault."""
    last: dict[int, Event] = {}
    step_s: list[float] = []
    cpu_s: dict[int, list[float]] = defaultdict(list)
    for event in run.steps:
        if event["t"] >= run.fault_s or not event.get("part", True):
            continue
        before = last.get(event["pid"])
        if before and event["step"] == before["step"] + 1 and event["step"] > WARM_STEPS:
            step_s.append(event["t"] - before["t"])
            cpu_s[event["pid"]].append(event["cpu"] - before["cpu"])
        last[event["pid"]] = event
    return Rates(
        step_s=median(step_s),
        worker_cpu_s=median(median(values) for values in cpu_s.values()),
        job_cpu_s=_job_cpu(run),
    )


def _job_cpu(run: Run) -> float | None:
    if len(run.usage) < 2:
        return None
    begin, end = run.usage[0], run.usage[-1]
    steps = sum(begin["t"] <= event["t"] < end["t"] for event in run.steps) / 2
    spent_s = sum(
        usage["cpu_s"] - begin["processes"].get(pid, {"cpu_s": 0.0})["cpu_s"]
        for pid, usage in end["processes"].items()
    )
    return spent_s / steps if steps else None


def committed_steps(run: Run) -> str:
    """Of the undisturbed steps, how many were committed; "-" for what is not DeadPool."""
    if not run.own_events:
        return "-"
    end = int(run.facts["kill"] or run.facts["steps"])
    wanted = range(WARM_STEPS + 1, end)
    seen = {event["step"] for event in run.own_events if event["event"] == "snapshot.committed"}
    return f"{len(seen & set(wanted))}/{len(wanted)}"


# ---- recovery ------------------------------------------------------------------------------------------


def recovery_of(run: Run) -> Recovery | None:
    """What happened after the fault; None if there was none."""
    struck_s = run.fault_s
    if struck_s == float("inf"):
        return None
    reached = max((event["step"] for event in run.steps if event["t"] < struck_s), default=0)
    after = [event for event in run.steps if event["t"] >= struck_s]

    def first(is_meant: Callable[[Event], bool]) -> float | None:
        return next((event["t"] - struck_s for event in after if is_meant(event)), None)

    beyond_s = first(lambda event: event["step"] > reached)
    is_full = lambda event: event["world"] >= 2 and event.get("part", True)  # noqa: E731 used right below
    return Recovery(
        first_s=first(lambda event: True),
        beyond_s=beyond_s,
        full_s=first(lambda event: event["step"] > reached and is_full(event)),
        lost_steps=max(0, reached - min(event["step"] for event in after) + 1) if after else None,
        marks=_marks(run, struck_s, struck_s + (beyond_s or 1e9)),
    )


def _marks(run: Run, struck_s: float, until_s: float) -> dict[str, float]:
    """Milestones of a recovery, in seconds after the fault; of the slowest process unless said otherwise."""
    events = [event for event in run.events if struck_s < event["t"] <= until_s]
    own = [event for event in run.own_events if struck_s < event["wall_s"] <= until_s]

    def named(name: str) -> list[float]:
        return [event["t"] for event in events if name in (event.get("name"), event["ev"])]

    def published(phase: str) -> list[float]:
        return [e["wall_s"] for e in own if e["event"] == "view.published" and e.get("phase") == phase]

    moments: list[tuple[str, Iterable[float], Callable[[Iterable[float]], float]]] = [
        (
            "death seen",
            [e["wall_s"] for e in own if e["event"] == "worker.exited"] or _noticed(run, struck_s),
            min,
        ),
        ("detect", [e["wall_s"] for e in own if e["event"] == "recovery.begin"], min),
        ("abort", [e["wall_s"] for e in own if e.get("phase") == "abort"], max),
        ("agree", published("restoring"), min),
        ("not committed", named("not_committed"), max),
        ("finalize (all)", named("finalize"), max),
        ("re-enter fn", named("fn_enter") if not own else [], max),
        ("manager sees death", named("mgr_detect"), min),
        ("survivor flushed, exited", named("mgr_flushed"), min),
        ("plan published", named("mgr_publish"), min),
        ("new process", named("proc") if not own else [], max),
        ("imports", named("import") if not own else [], max),
        ("group", named("pg") if not own else [], max),
        ("built", named("built"), max),
        ("loaded", named("loaded"), max),
        ("fetch, rebuild, restore", published("running"), min),
        ("first step", [e["t"] for e in events if e["ev"] == "step"], min),
    ]
    return {name: choose(times) - struck_s for name, times, choose in moments if list(times)}


def _noticed(run: Run, struck_s: float) -> list[float]:
    """When a launcher's log first speaks of the dead process, or the survivors notice by themselves."""
    found = []
    for path in run.folder.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            moment_s = _log_time(line, struck_s) if re.search("exitcode: -9|returncode.*-9", line) else None
            if moment_s is not None and moment_s >= struck_s - 0.01:
                found.append(moment_s)
    survivors = [event["t"] for event in run.events if event.get("name") in ("finalize", "not_committed")]
    return found or [moment_s for moment_s in survivors if moment_s > struck_s]


def _log_time(line: str, near_s: float) -> float | None:
    """Unix time of a line with a glog stamp (E0131 ...) or an ISO one, both in UTC."""
    if glog := re.search(r"[EWI](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d+)", line):
        text = f"{datetime.fromtimestamp(near_s, UTC).year}-{glog[1]}-{glog[2]} {glog[3]}"
    elif iso := re.search(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[.,](\d+)", line):
        text = f"{iso[1]} {iso[2]}.{iso[3]}"
    else:
        return None
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()


def median(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.median(listed) if listed else float("nan")
