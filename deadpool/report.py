"""The schemas of what DeadPool hands out: `report.json`, an agent's answer, and `deadpool status --json`.

These are interfaces: fields are added, never renamed. `report_schema` and `status_schema` give JSON schemas.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 1


# ---- report.json -------------------------------------------------------------------------------------


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a recovery was needed: the first fault that its generation answers."""

    kind: str  # a fault kind of deadpool.core.types, or what the leader said
    ranks: tuple[int, ...] = ()
    host: str = ""
    member: str = ""
    detail: str = ""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One generation that was opened because of a fault."""

    generation: int
    cause: Cause
    phases: dict[
        str, float
    ]  # detect, abort, agree, fetch, rebuild, restore, first_step -> seconds, slowest host
    seconds: float | None  # from the first fault (or its detection) to all ranks running; None if superseded
    rollback_step: int | None = None
    rollback_generation: int | None = None
    lost_steps: int | None = None
    source: str = ""  # replica, replicated or checkpoint
    is_done: bool = False  # False: a newer generation took over before all ranks ran


class GenerationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last View of one generation."""

    generation: int
    phase: str
    slots: tuple[str, ...]
    reason: str
    wall_s: float


class InjectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was injected on purpose and fired."""

    spec: str
    kind: str
    rank: int
    step: int
    point: str
    pid: int
    monotonic_s: float  # comparable with events of the same machine only
    wall_s: float = 0.0
    index: int = -1


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process that ran as a rank."""

    rank: int
    member: str
    pid: int
    generation: int
    role: str  # active, or promoted


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step over all ranks: the slowest rank's percentiles."""

    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    steps: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`--report FILE`: what happened in a run."""

    schema: int = SCHEMA_VERSION
    job_id: str
    exit_code: int | None
    reason: str
    nnodes: int
    spares: int
    nproc_per_node: int
    generations: tuple[GenerationReport, ...]
    recoveries: tuple[Recovery, ...]
    injections: tuple[InjectionReport, ...]
    workers: tuple[WorkerReport, ...]
    protected_step: int | None  # newest committed step
    bytes_sent: int
    host_memory_bytes: dict[str, int]  # member -> bytes of its host memory store
    step_times: StepTimes | None
    digests: dict[str, dict[str, str]]  # rank -> tensor or blob part -> sha256 of the final state
    degraded: tuple[str, ...]  # reasons, in order, each once
    agents_seen: int = 0  # incarnations of hosts whose events it was made from


# ---- an agent's answer -------------------------------------------------------------------------------


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as its agent sees it."""

    rank: int | None  # None while parked
    pid: int
    state: str
    finished_step: int = 0


class Protected(msgspec.Struct, frozen=True, kw_only=True):
    """The newest snapshot that is complete on owner and holder of every rank."""

    step: int
    generation: int
    age_s: float


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent answers on its control port; the runtime fills it, `deadpool status` reads it."""

    member: str
    host: str
    generation: int
    phase: str
    reason: str = ""
    slots: tuple[str, ...] = ()  # of the View it obeys
    nproc: int = 1
    leader: str = ""  # member that leads, as far as it knows
    waits_for: tuple[str, ...] = ()  # hosts without which the phase does not go on; only the leader knows
    reaches_store: bool = True
    granted_ttl_s: float | None = None
    lease_left_s: float | None = None
    suspects: tuple[str, ...] = ()  # members it has not heard for silence_suspect_s
    replaced: tuple[str, ...] = ()  # members that had a slot until the newest recovery that replaced any
    workers: tuple[WorkerStatus, ...] = ()
    protected: Protected | None = None
    replication_factor: int = 1
    degraded: tuple[str, ...] = ()
    memory_bytes: int = 0
    bytes_sent: int = 0


# ---- deadpool status ---------------------------------------------------------------------------------


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the job."""

    member: str
    host: str
    state: str  # active, spare, suspect, quarantined or dead
    slot: int | None = None
    ranks: tuple[int, ...] = ()
    finished_step: int | None = None
    lease_left_s: float | None = None
    note: str = ""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a logical rank."""

    rank: int
    slot: int
    member: str
    host: str = ""
    pid: int | None = None
    state: str = ""
    finished_step: int | None = None


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`deadpool status --json`."""

    schema: int = SCHEMA_VERSION
    job_id: str
    control_plane: str  # reachable, unreachable or ended (with the job)
    generation: int | None
    phase: str
    reason: str
    exit_code: int | None = None  # of a job that has ended
    leader: str = ""  # host that leads
    waits_for: tuple[str, ...] = ()  # hosts without which the phase does not go on
    world_size: int
    hosts: tuple[HostStatus, ...]
    ranks: tuple[RankStatus, ...]
    protected: Protected | None
    steps_at_risk: int | None  # finished, but not protected yet
    survivable_host_losses: int  # any so many hosts may be lost at once, and a step is kept
    degraded: tuple[str, ...]
    granted_ttl_s: float | None
    recoveries: tuple[dict[str, Any], ...]


def report_schema() -> dict[str, Any]:
    """JSON schema of `report.json`."""
    return msgspec.json.schema(Report)


def status_schema() -> dict[str, Any]:
    """JSON schema of `deadpool status --json`."""
    return msgspec.json.schema(JobStatus)
