"""`deadpool inject JOB KIND:rank=R`: strike a running job of this machine from outside.

The spec, the plan and the act are in `deadpool.testing.faults`.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

from deadpool.cli.jobs import find_job_at
from deadpool.cli.rundir import read_workers
from deadpool.config import nearest
from deadpool.errors import ConfigError
from deadpool.liveness.stat import parent_of, started_s
from deadpool.runtime import launch, worker
from deadpool.testing.faults import (
    Injection,
    InjectionKind,
    InjectionPlan,
    Point,
    carry_out,
    parse_injection,
    parse_injections,
    read_number,
    record_injection,
    strike,
)

__all__ = [
    "Injection",
    "InjectionKind",
    "InjectionPlan",
    "Point",
    "carry_out",
    "inject_running_job",
    "parse_injection",
    "parse_injections",
]

_KINDS_FROM_OUTSIDE = (
    InjectionKind.SIGKILL,
    InjectionKind.SIGSTOP,
    InjectionKind.HOST_LOSS,
    InjectionKind.HOST_STOP,
)
_START_TOLERANCE_S = 0.1  # /proc counts starts in ticks of 10 ms


def inject_running_job(job_id: str | None, spec: str, jobs_folder: Path | None = None) -> str:
    """`deadpool inject JOB KIND:rank=R`: strike a worker or host of a job on this machine, now.

    Args:
        job_id: of a job of this machine, or the run folder of a job under Slurm; None: the only one here.
        spec: KIND:rank=R.
        jobs_folder: of the job files.

    Returns:
        A sentence that says what was done.

    Raises:
        ConfigError: bad spec, no such job, or no live worker of that rank on this machine.
    """
    kind_text, _, rank_text = spec.partition(":")
    kinds = {kind.value: kind for kind in _KINDS_FROM_OUTSIDE}
    rank = read_number(rank_text, "rank", 0)
    problems: list[str] = []
    if kind_text not in kinds:
        near = nearest(kind_text, list(kinds))
        problems.append(f"unknown kind {kind_text!r}{near} (kinds from outside: {', '.join(kinds)})")
    if rank is None:
        problems.append("give the injection as KIND:rank=R; it strikes at once, so it has no step")
    if problems or rank is None:
        raise ConfigError(problems)
    try:
        run_dir = Path(find_job_at(job_id, None, jobs_folder).run_dir)
    except ConfigError as error:
        hint = "under Slurm, give the run folder in place of JOB, on the node of the rank"
        raise ConfigError([*error.problems, hint]) from error
    pid, agent_pid = _find_worker(run_dir, rank)
    kind = kinds[kind_text]
    injection = Injection(kind=kind, rank=rank, step=0, index=-1, spec=spec)
    for number in range(10_000):
        if record_injection(run_dir / "injections" / f"manual-{number}.json", injection, pid):
            break
    strike(kind, pid, agent_pid)
    return f"{kind.value} sent to {'the host of ' if kind.hits_host else ''}rank {rank} (worker pid {pid})"


def _find_worker(run_dir: Path, rank: int) -> tuple[int, int]:
    """Process ids of the worker of a rank and of its agent.

    The folder may be shared by many machines. Process ids and clocks of others mean nothing here, and in
    containers they are nearly the same everywhere: so the process and its parent say whose they are.

    Raises:
        ConfigError: there is none on this machine.
    """
    taken = [line for line in read_workers(run_dir) if line.rank == rank]
    if not taken:
        raise ConfigError([f"no process has run as rank {rank} yet (looked into {run_dir})"])
    newest = taken[-1]
    host = newest.member.rpartition("-")[0]
    started, agent_pid = started_s(newest.pid), parent_of(newest.pid)
    if (
        started is None
        or agent_pid is None
        or started > newest.monotonic_s + _START_TOLERANCE_S  # the number was given to another process
        or not _is_worker_of(newest.pid, agent_pid, run_dir)
        or _host_of(agent_pid) != host
    ):
        raise ConfigError(
            [
                f"no live worker of rank {rank} on this machine: it last ran on host {host}, as process "
                f"{newest.pid}; if that is another machine, run this there (a process that has given itself "
                "a title with setproctitle cannot be told apart from others, and is left alone)"
            ]
        )
    return newest.pid, agent_pid


def _is_worker_of(pid: int, agent_pid: int, run_dir: Path) -> bool:
    """Whether this process is a worker of that agent in that run; what it forked differs by its parent."""
    given = _handover(pid, worker.ENVIRONMENT)
    return given.get("parent") == agent_pid and Path(given["run_dir"]).resolve() == run_dir.resolve()


def _host_of(agent_pid: int) -> str:
    """Host name of an agent: what its launcher gave it, or without one that of this machine."""
    given: str | None = _handover(agent_pid, launch.ENVIRONMENT).get("host")
    return socket.gethostname().split(".")[0] if given is None else given


def _handover(pid: int, name: str) -> dict[str, Any]:
    """What a process was handed over in this variable when it was started; {} if nothing."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    for each in environment:
        if each.startswith(f"{name}=".encode()):
            with contextlib.suppress(ValueError):  # a title was written over it
                found: dict[str, Any] = json.loads(each.partition(b"=")[2])
                return found
    return {}
