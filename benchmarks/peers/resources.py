"""What the processes of a run use: CPU, wakeups and memory, read from /proc."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One process. `pss_bytes` counts a page shared by n processes as one nth."""

    role: str  # worker, agent, etcd, launcher, helper
    parent: int  # pid
    cpu_s: float
    wakeups: int  # voluntary context switches of all its threads
    pss_bytes: int


def sample(run_dir: Path) -> dict[str, Any]:
    """Usage of every process of a run, by pid, with the time."""
    return {
        "t": time.time(),
        "processes": {str(pid): asdict(usage) for pid in find_processes(run_dir) if (usage := _usage(pid))},
    }


def find_processes(run_dir: Path) -> list[int]:
    """Processes that were started with this RUN_DIR in their environment, this one excepted."""
    mark = f"RUN_DIR={run_dir}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # ended meanwhile, or belongs to somebody else
            continue
    return found


def _usage(pid: int) -> Usage | None:
    folder = Path("/proc") / str(pid)
    try:
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        switches = [
            _field(task / "status", "voluntary_ctxt_switches:") for task in (folder / "task").iterdir()
        ]
        return Usage(
            role=_role(command),
            parent=int(stat[1]),
            cpu_s=(int(stat[11]) + int(stat[12])) / _TICKS_PER_S,
            wakeups=sum(switches),
            pss_bytes=_field(folder / "smaps_rollup", "Pss:") * 1024,
        )
    except OSError:  # ended meanwhile
        return None


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0  # a kernel thread, or a process that is ending, has no such line


def _role(command: str) -> str:
    for word, role in (
        ("worker_main", "worker"),
        ("agent_main", "agent"),
        ("etcd", "etcd"),
        ("torch.distributed.run", "launcher"),
        ("deadpool run", "launcher"),
        ("train_", "worker"),
    ):
        if word in command:
            return role
    return "helper"
