"""Small JSON files of a run folder, each written so that a reader sees all of it or none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from deadpool.core.types import MemberId, View
from deadpool.events import boottime_s


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
    write_json(run_dir / "result.json", msgspec.to_builtins(result))


def read_result(run_dir: Path) -> RunResult:
    """What `write_result` wrote; the defaults if the hosts ended before a View said how."""
    try:
        return msgspec.json.decode((run_dir / "result.json").read_bytes(), type=RunResult)
    except (OSError, msgspec.MsgspecError):
        return RunResult()


def note_agent(run_dir: Path, member: MemberId, address: str, port: int) -> None:
    """Append a line to `agents.jsonl`: where `deadpool status` finds this agent when etcd is away."""
    with open(run_dir / "agents.jsonl", "ab", buffering=0) as file:  # one write: lines never mix
        file.write(json.dumps({"member": member, "address": f"{address}:{port}"}).encode() + b"\n")


def note_worker(run_dir: Path, member: MemberId, rank: int, pid: int, generation: int, role: str) -> None:
    """Append a line to `workers.jsonl`: this process runs as this rank from now on."""
    line = {
        "member": member,
        "rank": rank,
        "pid": pid,
        "generation": generation,
        "monotonic_s": boottime_s(),
        "role": role,
    }
    with open(run_dir / "workers.jsonl", "ab", buffering=0) as file:  # one write: lines never mix
        file.write(json.dumps(line).encode() + b"\n")
