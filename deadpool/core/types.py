"""The values that all parts of DeadPool exchange. Frozen, hashable, comparable; no behaviour but naming.

Encoded with msgspec at the edges; nothing here knows about encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MemberId = str
"""One agent's registration (its incarnation): a returning host is a new one. Unique for ever."""


class Phase(Enum):
    """Phase of a View. Every phase except RUNNING, FINISHED and HALTED is left within a bound."""

    FORMING = "forming"
    RUNNING = "running"
    ABORTING = "aborting"
    RESTORING = "restoring"
    STALLED = "stalled"
    FINISHED = "finished"
    HALTED = "halted"


class Source(Enum):
    """Where the state of a RESTORING view comes from."""

    MEMORY = "memory"
    CHECKPOINT = "checkpoint"


class FaultKind(Enum):
    """The one named cause of a fault."""

    WORKER_EXIT = "worker_exit"  # child exit by signal or code, seen by its agent
    WORKER_STUCK = "worker_stuck"  # no progress while others wait; `ranks` are the culprits
    USER_ERROR = "user_error"  # an exception of the user's code; `detail` is the traceback
    BAD_INPUT = "bad_input"  # state or settings that cannot be protected: trying again would not help
    COLLECTIVE = "collective"  # a failed collective: evidence, not proof
    ABORT_TIMEOUT = "abort_timeout"  # worker missed a limit of the abort and was killed by its agent
    DEVICE = "device"  # sticky device error, ECC, fabric
    SPARE_FAILED = "spare_failed"  # self-test, fetch or rebuild failed on a joining spare


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Name:
    """Name of a snapshot: the state AFTER `step`, captured under `generation`. Orders by step first."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one agent says of itself when it registers."""

    id: MemberId
    host: str  # host name, or the host label of a standalone run
    address: str  # IP address or name that peers connect to
    control_port: int  # agent <-> agent messages and heartbeats
    data_port: int  # replica streams and fetches
    rendezvous_port: int  # key-value server for communicator bootstrap
    nproc: int  # workers on this host
    node_rank: int | None = None  # fixed slot wish, first start only
    domain: str = ""  # failure domain label (rack, switch, block); "" = the host itself
    versions: tuple[tuple[str, str], ...] = ()  # package -> version, must agree across members
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The published record: who fills which slot, in which generation and phase."""

    generation: int
    phase: Phase
    slots: tuple[MemberId, ...]  # [n_slots] slot -> member; "" while vacant
    nproc: int  # workers per slot; rank = slot * nproc + local rank
    joining: tuple[MemberId, ...] = ()  # members in `slots` that hold no state yet (promoted spares)
    leaving: tuple[MemberId, ...] = ()  # replaced members whose agent lives: sources until RUNNING
    rollback: Name | None = None  # fixed once per generation, when RESTORING is published
    source: Source = Source.MEMORY
    rendezvous: MemberId = ""  # agent that hosts the communicators' bootstrap store
    holders: tuple[tuple[int, ...], ...] = ()  # [n_slots] slot -> slots that hold its copies
    reason: str = ""  # one sentence for the operator
    exit_code: int | None = None  # set with FINISHED and HALTED

    @property
    def world_size(self) -> int:
        return len(self.slots) * self.nproc

    def slot_of_rank(self, rank: int) -> int:
        return rank // self.nproc

    def member_of_rank(self, rank: int) -> MemberId:
        return self.slots[rank // self.nproc]

    def ranks_of_slot(self, slot: int) -> range:
        return range(slot * self.nproc, (slot + 1) * self.nproc)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCopies:
    """Complete copies of one rank on one host, with their names."""

    rank: int
    own: tuple[Name, ...] = ()  # complete in the owner's own banks: unique, blob and replicated
    held: tuple[Name, ...] = ()  # complete in this host's replica banks for that rank: unique and blob


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All complete copies on one member, as acked. Only COMPLETE banks whose checksum holds."""

    member: MemberId
    copies: tuple[RankCopies, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedGroup:
    """Ranks that hold the same replicated bytes (a DDP job has one group: all ranks)."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One report of a fault."""

    kind: FaultKind
    member: MemberId  # who reports, or whose worker it is
    generation: int
    ranks: tuple[int, ...] = ()  # logical ranks it concerns (the culprits)
    step: int = 0
    pairs: tuple[tuple[int, int], ...] = ()  # (from, to) ranks that could not reach each other
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """One host's acknowledgement of a phase of a generation."""

    member: MemberId
    generation: int
    phase: Phase
    inventory: Inventory | None = None  # with ABORTING: final, taken after the workers are quiet
    lost_ranks: tuple[int, ...] = ()  # own ranks whose worker is gone ("rank r lost, copies kept")
    last_step: int = 0  # newest step that any own rank finished
    seconds: tuple[tuple[str, float], ...] = ()  # phase name -> seconds (fetch, rebuild, restore)
    groups: tuple[ReplicatedGroup, ...] = ()  # with ABORTING: replicated groups of the own ranks' layouts
    restore_extra_s: float = 0.0  # with ABORTING: what building and fetching a host of this size may add
