"""Reading a run folder: events, injections, workers, digests. Files in docs/report.md.

Everything here was appended by processes that may have been killed in mid-write, so a torn line is skipped.
"""

from __future__ import annotations

import heapq
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from deadpool.runtime.descriptors import raise_descriptor_limit

T = TypeVar("T")
_COMMIT = b'"event": "snapshot.committed"'
_REFUSAL = b'"event": "snapshot.refused"'


class AgentLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of agents-<member>.jsonl: this agent answers there."""

    member: str
    address: str  # IP:control_port

    @property
    def host(self) -> str:
        return self.member.rpartition("-")[0]


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of workers-<member>.jsonl: this process runs as this rank from now on."""

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
    wall_s: float


class RankDigests(msgspec.Struct, frozen=True, kw_only=True):
    """A file of digests/: the state of one rank at its start and at FINISHED."""

    rank: int
    pid: int
    member: str
    initial: dict[str, str]
    final: dict[str, str]
    blob: dict[str, str]
    steps: int


def read_events(run_dir: Path, *, has_every_step: bool = True) -> list[dict[str, Any]]:
    """Events of all hosts, by time. Between machines the order is as good as their clocks.

    Args:
        run_dir: folder of the run.
        has_every_step: with each `snapshot.committed` and `snapshot.refused`, of which a day of a large job
            has millions; else with the last commit of each file.
    """
    events: list[dict[str, Any]] = []
    for path in event_files(run_dir):
        lines = _lines(path) if has_every_step else _without_steps(path)
        events.extend(event for _, event in _events(lines))
    return sorted(events, key=_wall_s)


def event_files(run_dir: Path) -> list[Path]:
    """A file per incarnation of an agent."""
    return sorted(run_dir.glob("events-*.jsonl"))


def merge_events(run_dir: Path, target: Path) -> None:
    """Write the events of all hosts into one file (`--events FILE`).

    A day of a large job leaves gigabytes, so nothing is held but a line of each file. Each is in the order of
    its own time; where its clock was set back, so is the order of what is written.
    """
    raise_descriptor_limit()
    files = [_events(_lines(path)) for path in event_files(run_dir)]
    with replacing(target) as file:
        for line, _ in heapq.merge(*files, key=lambda item: _wall_s(item[1])):
            file.write(line.rstrip(b"\n") + b"\n")


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Write a file so that a reader sees all of it or none; of several writers, the last one counts."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # By chance, not by process id: hosts that write one file into a shared folder may have the same.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_workers(run_dir: Path) -> list[WorkerLine]:
    """Worker processes; of one rank in the order in which they took it."""
    lines = _typed(_all_json_lines(run_dir, "workers-*.jsonl"), WorkerLine)
    return sorted(lines, key=lambda line: (line.generation, line.monotonic_s))


def read_agents(run_dir: Path) -> list[AgentLine]:
    """Agents that came to the job, by name."""
    return list(_typed(_all_json_lines(run_dir, "agents-*.jsonl"), AgentLine))


def read_injections(run_dir: Path) -> list[InjectionRecord]:
    """Injections that fired, by time."""
    lines = _all_json_lines(run_dir / "injections", "*.json")
    return sorted(_typed(lines, InjectionRecord), key=lambda record: record.wall_s)


def read_digests(run_dir: Path) -> dict[int, RankDigests]:
    """Digests by rank, as far as ranks left any."""
    lines = _all_json_lines(run_dir / "digests", "rank-*.json")
    return {digests.rank: digests for digests in _typed(lines, RankDigests)}


def _all_json_lines(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(pattern)):
        yield from _decoded(_lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except FileNotFoundError:
        return


def _without_steps(path: Path) -> Iterator[bytes]:
    newest = b""
    for line in _lines(path):
        if _COMMIT in line:
            newest = line if line.endswith(b"\n") else newest  # else it is torn
        elif _REFUSAL not in line:
            yield line
    yield newest


def _events(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines that are events, as they are and decoded."""
    for line in lines:
        event = _decode(line)
        if event is not None and isinstance(event.get("event"), str) and "wall_s" in event:
            yield line, event


def _wall_s(event: dict[str, Any]) -> float:
    return float(event["wall_s"])


def _decoded(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        value = _decode(line)
        if value is not None:
            yield value


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None  # empty, or torn by a kill
    return value if isinstance(value, dict) else None


def _typed(lines: Iterator[dict[str, Any]], kind: type[T]) -> Iterator[T]:
    for line in lines:
        try:
            yield msgspec.convert(line, kind)
        except msgspec.ValidationError:
            continue  # another version's line: what needs it will say that it is missing
