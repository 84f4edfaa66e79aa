"""Reading a run folder: events, injections, workers, digests. Files in docs/report.md.

Everything here was appended by processes that may have been killed in mid-write, so a torn line is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_COMMIT = b'"event": "snapshot.committed"'


class AgentLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of agents.jsonl: this agent answers there."""

    member: str
    address: str  # IP:control_port

    @property
    def host(self) -> str:
        return self.member.rpartition("-")[0]


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of workers.jsonl: this process runs as this rank from now on."""

    member: str
    rank: int
    pid: int
    generation: int
    monotonic_s: float
    role: str  # active or promoted


class InjectionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file of injections/: written just before the act."""

    index: int
    spec: str
    kind: str
    rank: int
    step: int
    point: str
    pid: int
    monotonic_s: float


class RankDigests(msgspec.Struct, frozen=True, kw_only=True):
    """A file of digests/: the state of one rank at its start and at FINISHED."""

    rank: int
    pid: int
    member: str
    initial: dict[str, str]
    final: dict[str, str]
    blob: dict[str, str]
    steps: int


def read_events(run_dir: Path, *, has_every_commit: bool = True) -> list[dict[str, Any]]:
    """Events of all hosts, by time. Between machines the order is as good as their clocks.

    Args:
        run_dir: folder of the run.
        has_every_commit: with each `snapshot.committed`, of which a day of a large job has millions; else
            with the last one of each file.
    """
    paths = sorted(run_dir.glob("events-*.jsonl"))
    lines = (
        line
        for path in paths
        for line in (_lines(path) if has_every_commit else _without_older_commits(path))
    )
    events = list(_decoded(lines))
    return sorted(
        (event for event in events if isinstance(event.get("event"), str)),
        key=lambda event: float(event.get("wall_s", 0.0)),
    )


def merge_events(run_dir: Path, target: Path) -> None:
    """Write the events of all hosts into one file (`--events FILE`)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "w", encoding="utf-8") as file:
        for event in read_events(run_dir):
            file.write(json.dumps(event) + "\n")


def read_workers(run_dir: Path) -> list[WorkerLine]:
    """Worker processes in the order in which they took their ranks."""
    return list(_typed(_json_lines(run_dir / "workers.jsonl"), WorkerLine))


def read_agents(run_dir: Path) -> list[AgentLine]:
    """Agents in the order in which they started."""
    return list(_typed(_json_lines(run_dir / "agents.jsonl"), AgentLine))


def read_injections(run_dir: Path) -> list[InjectionRecord]:
    """Injections that fired, by time."""
    found: list[dict[str, Any]] = []
    for path in sorted((run_dir / "injections").glob("*.json")):
        found.extend(_json_lines(path))
    return sorted(_typed(iter(found), InjectionRecord), key=lambda record: record.monotonic_s)


def read_digests(run_dir: Path) -> dict[int, RankDigests]:
    """Digests by rank, as far as ranks left any."""
    found: list[dict[str, Any]] = []
    for path in sorted((run_dir / "digests").glob("rank-*.json")):
        found.extend(_json_lines(path))
    return {digests.rank: digests for digests in _typed(iter(found), RankDigests)}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    return _decoded(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except FileNotFoundError:
        return


def _without_older_commits(path: Path) -> Iterator[bytes]:
    newest = b""
    for line in _lines(path):
        if _COMMIT not in line:
            yield line
        elif line.endswith(b"\n"):  # else it is torn
            newest = line
    yield newest


def _decoded(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue  # empty, or torn by a kill
        if isinstance(value, dict):
            yield value


def _typed(lines: Iterator[dict[str, Any]], kind: type[T]) -> Iterator[T]:
    for line in lines:
        try:
            yield msgspec.convert(line, kind)
        except msgspec.ValidationError:
            continue  # another version's line: what needs it will say that it is missing
