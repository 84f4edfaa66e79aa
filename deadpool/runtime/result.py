"""Small JSON files of a run folder, each written so that a reader sees all of it or none."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import msgspec

from deadpool.core.types import MemberId, View
from deadpool.events import boottime_s

logger = logging.getLogger(__name__)


def write_json(path: Path, value: object) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended, and which agents were in the final View (`result.json`)."""

    exit_code: int = 0
    reason: str = "no host said how the job ended"
    generation: int = 0
    phase: str = ""
    pids: tuple[int, ...] = ()
    members: tuple[MemberId, ...] = ()


def write_result(run_dir: Path, view: View, pids: list[int]) -> None:
    """Say how the job ended."""
    result = RunResult(
        exit_code=view.exit_code or 0,
        reason=view.reason,
        generation=view.generation,
        phase=view.phase.value,
        pids=tuple(pids),
        members=view.slots,
    )
    try:
        write_json(run_dir / "result.json", msgspec.to_builtins(result))
    except OSError as error:  # the workers' scripts go on behind `wrap` all the same
        logger.warning("%s: how the job ended could not be written: %s", run_dir, error)


def note_result(run_dir: Path, exit_code: int, reason: str) -> None:
    """Say how a job ended whose View did not: that the hosts were told to end, say."""
    path = run_dir / "result.json"
    if not path.exists():
        write_json(path, msgspec.to_builtins(RunResult(exit_code=exit_code, reason=reason)))


def read_result(run_dir: Path) -> RunResult:
    """What `write_result` wrote; the defaults if the hosts ended before a View said how."""
    try:
        return msgspec.json.decode((run_dir / "result.json").read_bytes(), type=RunResult)
    except (OSError, msgspec.MsgspecError):
        return RunResult()


def _append(path: Path, line: object) -> None:
    """A file per member: on NFS, appends of two machines overwrite each other.

    What is lost for a full disk is a note for people, no state.
    """
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        logger.warning("%s: a line could not be written: %s", path, error)


def note_agent(run_dir: Path, member: MemberId, address: str, port: int) -> None:
    """Append a line to `agents-<member>.jsonl`: where `status` finds this agent when etcd is away."""
    _append(run_dir / f"agents-{member}.jsonl", {"member": member, "address": f"{address}:{port}"})


def note_worker(run_dir: Path, member: MemberId, rank: int, pid: int, generation: int, role: str) -> None:
    """Append a line to `workers-<member>.jsonl`: this process runs as this rank from now on."""
    line = {
        "member": member,
        "rank": rank,
        "pid": pid,
        "generation": generation,
        "monotonic_s": boottime_s(),
        "role": role,
    }
    _append(run_dir / f"workers-{member}.jsonl", line)
