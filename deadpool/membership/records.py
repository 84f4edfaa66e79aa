"""Records that only the registry writes, and the events that its watch reports. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from deadpool.core.types import Ack, Fault, Member, MemberId, View

Term = int
"""One leadership: the create revision of the leader's key. A later one is greater."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The leader's record."""

    member: MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All ranks of a member finished the last step, in this generation."""

    member: MemberId
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedMember:
    """An incarnation that may not enrol again."""

    member: MemberId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A host that gets no slot any more."""

    host: str
    member: MemberId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClaim:
    """Who a job is. Agents that are started together find the same one; `token` is their shared secret."""

    run_id: str  # "" if the launcher gives none
    token: str
    n_members: int  # active hosts and spares
    claimed_by: str  # host and pid, for messages


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPut:
    """A member registered, or came back with another lease."""

    member: Member
    lease: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGone:
    """A member's lease ended. Not proof of its death if the store was away."""

    member_id: MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderPut:
    """A member leads."""

    member_id: MemberId
    term: Term


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderGone:
    """Nobody leads; campaign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewPut:
    """A View was published."""

    view: View
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewGone:
    """The job was erased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AckPut:
    """A member acknowledged a phase."""

    ack: Ack


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPut:
    """A member reported a fault."""

    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPut:
    """A member finished."""

    member_id: MemberId
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePut:
    """A host was quarantined."""

    quarantine: Quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineGone:
    """A host may be used again."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReached:
    """The watch is live: at first after all existing records; after an interruption before what was missed.

    For two TTL from now a missing member alone is no evidence of its death.
    """

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost:
    """The watch lost the store; it tries to come back by itself."""

    problem: str


RegistryEvent = (
    MemberPut
    | MemberGone
    | LeaderPut
    | LeaderGone
    | ViewPut
    | ViewGone
    | AckPut
    | FaultPut
    | FinishedPut
    | QuarantinePut
    | QuarantineGone
    | StoreReached
    | StoreLost
)
