"""What can be simulated, and what comes out: the values around simulator.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from deadpool.core.membership import Limits
from deadpool.core.types import Phase


class Happening(Enum):
    """What can go wrong with a host."""

    HOST_LOSS = "host loss"  # gone; its lease expires
    HOST_STOP = "host stop"  # silent; noticed by its neighbours
    AGENT_HANGS = "agent hangs"  # heartbeats go on, nothing is acknowledged
    WORKER_EXIT = "worker exit"
    WORKER_STUCK = "worker stuck"
    USER_ERROR = "user error"
    DEVICE = "device fault"
    COLLECTIVE = "failed collective"  # a link that recovers
    SPARE_FAILED = "spare fails"
    LEADER_DIES = "another leader takes over"


class Target(Enum):
    """Which host it happens to."""

    FIRST_SLOT = "rank 0's host"
    SURVIVOR = "a survivor"
    OTHER = "a host beyond the survivor's neighbours"
    JOINING = "a joining host"
    LEAVING = "a leaving host"
    SPARE = "a spare"


@dataclass(frozen=True, kw_only=True)
class Injection:
    """`happening` to `target` as soon as a View of `phase` is published, once."""

    happening: Happening
    phase: Phase
    target: Target


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A job and its fate."""

    hosts: int = 4
    nproc: int = 2
    spares: int = 3
    seed: int = 0
    last_step: int = 40
    step_s: float = 1.0
    losses: int = 0  # hosts lost at random times
    loss_mean_s: float = 600.0  # between two of them
    return_s: float | None = 60.0  # a lost host comes back as a spare after this, or twice that
    arrivals_s: tuple[float, ...] = ()  # further hosts join as spares
    injections: tuple[Injection, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of it."""

    phase: Phase
    exit_code: int | None
    reason: str
    generation: int
    events: int
    virtual_s: float
    recoveries_s: tuple[float, ...]  # from ABORTING to RUNNING
    lost_steps: int
    injected: int  # injections that found their target
    digest: str
