"""Values of the membership machine: limits, state, events, effects. The rules are in membership.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deadpool.core.silence import NO_SILENCES, Silences
from deadpool.core.types import Ack, Fault, FaultKind, Member, MemberId, Name, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the leader waits for what, and how often it tries. Defaults: table in DESIGN section 7."""

    lease_ttl_s: float = 5.0  # for 2 x TTL after an election a missing key alone is no evidence
    suspect_s: float = 2.0  # failed collective without a confirmed death -> same members, g + 1
    abort_s: float = 57.0  # acks of ABORTING: workers' limits (2 + 10 + 30 s) + 15 s
    restore_s: float = 45.0  # acks of RESTORING, plus what the acks of ABORTING ask for (restore_extra_s)
    spare_wait_s: float = 600.0  # STALLED before the job ends with code 3
    forming_s: float = 600.0  # all hosts registered; then, again, snapshot 0 complete everywhere
    only_copy_extra_s: float = 60.0  # more patience with an agent that holds the only copy
    recurrence_s: float = (
        300.0  # a failed collective within this time after one came back: hosts are replaced
    )
    replicas: int = 1  # holders per slot
    spares: int = (
        0  # hosts that are to come beyond the slots: between versions, what most of all have is right
    )
    max_attempts: int = 3  # tries of one recovery, or of FORMING, before other hosts or the end are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What brought workers down; the same again and again ends the job instead of burning all spares."""

    kind: FaultKind
    ranks: tuple[int, ...]  # () for USER_ERROR: the same exception on another rank is the same
    step: int
    line: str = ""  # last line of the traceback, for USER_ERROR
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that the leader knows. Frozen and hashable. Never built by hand: `initial_state`, then `step`."""

    limits: Limits
    n_slots: int
    nproc: int
    view: View | None = None  # None until all hosts are there
    members: tuple[
        Member, ...
    ] = ()  # alive, in order of registration; spares are those the view does not name
    fenced: frozenset[MemberId] = frozenset()  # incarnations that never come back
    quarantined: frozenset[str] = frozenset()  # hosts that get no slot any more
    checkpoint: Name | None = None  # last complete manifest
    versions: tuple[tuple[str, str], ...] | None = None  # settled before the first View; None: open

    deadline_s: float | None = None  # of the current phase
    is_extended: bool = False  # the only-copy patience is in use
    needed: int = 0  # bitset of slots whose ack the phase needs
    acked: int = 0  # bitset of slots that acked the current (generation, phase)
    acked_leaving: int = 0  # bitset of indices into view.leaving
    acks: tuple[Ack, ...] = ()  # of ABORTING: their inventories fix the rollback
    carried: frozenset[MemberId] = frozenset()  # joining since an earlier generation: may hold copies
    respawning: int = 0  # bitset of slots whose worker is replaced on the same host in this generation
    attempts: int = 0  # recoveries (or formings) since the job last ran

    suspected_at_s: float | None = None  # a collective failed and nobody is known to be dead
    suspected_step: int = 0  # newest step of these reports
    pairs: tuple[tuple[int, int], ...] = ()  # (from, to) of these reports
    unconfirmed_at_s: float | None = None  # when a generation was opened for such a failure last
    silences: Silences = NO_SILENCES
    missing: frozenset[MemberId] = frozenset()  # key gone within the grace time: no evidence yet
    grace_until_s: float = float("-inf")
    finished: int = 0  # bitset of slots
    causes: tuple[Cause, ...] = ()  # of worker losses, newest last; a few
    respawned: frozenset[tuple[int, int]] = frozenset()  # (slot, step) replaced on the same host before
    slot_of: Mapping[MemberId, int] = field(
        default_factory=dict, compare=False, repr=False
    )  # index of view.slots

    @property
    def spares(self) -> tuple[Member, ...]:
        """Members that may be given a slot, in order of registration."""
        named = set(self.view.leaving) if self.view else set()
        return tuple(
            m
            for m in self.members
            if m.id not in self.slot_of
            and m.id not in named
            and m.id not in self.missing
            and m.host not in self.quarantined
        )


# --- Events: what happened. `now_s` is any monotonic clock of the leader ---


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberJoined:
    """A registration appeared. Also a re-registration of the same incarnation."""

    member: Member
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired:
    """A registration is gone: lease expired, or deleted by the agent as it left."""

    member_id: MemberId
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SilencesHeard:
    """All that one observer does not hear now; it replaces what it said before. See core/silence.py."""

    observer: MemberId
    now_s: float
    silent: tuple[MemberId, ...] = ()  # nothing came from them for `silence_dead_s`
    gone: tuple[MemberId, ...] = ()  # their own hosts say that these processes do not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class AllWait:
    """Ranks wait in collectives for longer than the progress timeout, and counts blame nobody."""

    generation: int
    step: int
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReported:
    """A fault record appeared."""

    fault: Fault
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Acked:
    """An ack record appeared, or is read again by a new leader."""

    ack: Ack
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderElected:
    """This agent won the election. Feed it first, then every ack and finished record found in the store."""

    view: View | None
    members: tuple[Member, ...]  # registered now, in order of registration
    now_s: float
    quarantined: tuple[str, ...] = ()  # hosts
    checkpoint: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReadmitted:
    """The operator has mended a quarantined host; its next incarnation may be a spare."""

    host: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReturned:
    """The membership store answers again after an outage: missing keys are no evidence for 2 x TTL."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All ranks of a member finished the last step and wait in `wrap`."""

    member_id: MemberId
    generation: int
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound:
    """`name` is the last complete checkpoint, or None. Feed it at the start and after each one."""

    name: Name | None
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passes; deadlines are looked at. Send one at least every 100 ms."""

    now_s: float


Event = (
    MemberJoined
    | LeaseExpired
    | SilencesHeard
    | AllWait
    | FaultReported
    | Acked
    | LeaderElected
    | HostReadmitted
    | StoreReturned
    | Finished
    | CheckpointFound
    | Tick
)


# --- Effects: what to do, in this order ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishView:
    """Write `view`, guarded by the last View's revision and the own leadership. Refused: no longer leader."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """End this incarnation: revoke its lease, delete its key; with `quarantine` record its host as such.

    Guarded by the own leadership. Refused: no longer leader.
    If its agent lives it empties its store and registers as a new incarnation. Safe to repeat.
    """

    member_id: MemberId
    reason: str
    quarantine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over; the View published just before says the same to everybody."""

    exit_code: int
    reason: str


Effect = PublishView | Fence | End
