"""`deadpool inject JOB KIND:rank=R`: strike a running job of this machine from outside.

The spec, the plan and the act are in `deadpool.testing.faults`.
"""

from __future__ import annotations

import json
from pathlib import Path

from deadpool.cli.jobs import find_job
from deadpool.config import nearest
from deadpool.errors import ConfigError
from deadpool.liveness.stat import parent_of, started_s
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
    run_dir = Path(find_job(job_id, jobs_folder).run_dir)
    pid = _live_worker(run_dir / "workers.jsonl", rank)
    agent_pid = parent_of(pid) if pid is not None else None
    if pid is None or agent_pid is None:
        raise ConfigError([f"no live worker of rank {rank} on this machine (looked into {run_dir})"])
    kind = kinds[kind_text]
    injection = Injection(kind=kind, rank=rank, step=0, index=-1, spec=spec)
    for number in range(10_000):
        if record_injection(run_dir / "injections" / f"manual-{number}.json", injection, pid):
            break
    strike(kind, pid, agent_pid)
    return f"{kind.value} sent to {'the host of ' if kind.hits_host else ''}rank {rank} (worker pid {pid})"


def _live_worker(path: Path, rank: int) -> int | None:
    """Pid of the newest live worker of `rank`; an id that was given to another process meanwhile is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        entry = json.loads(line)
        if entry["rank"] == rank:
            pid = int(entry["pid"])
            started = started_s(pid)
            if started is not None and started <= entry["monotonic_s"] + _START_TOLERANCE_S:
                return pid
            return None
    return None
