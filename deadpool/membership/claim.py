"""Claiming a job id: is it free, our own, taken by a live job, or only littered by a dead one?

[Note: what proves that a job lives]
    A key with a lease proves nothing for up to one TTL: its agent may have been killed a moment ago. A
    missing key proves nothing either: etcd may have been frozen for longer than the TTL, and every agent of a
    healthy job is about to enrol again. Only a renewal proves life: a lease that has more time left than it
    could have without one, or that is new. One TTL without a renewal proves death, because agents renew three
    times in that span.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from deadpool.core.types import Phase, View
from deadpool.errors import ConfigError, StoreUnavailable
from deadpool.membership._events import decode_record
from deadpool.membership.lease import boottime_s
from deadpool.membership.records import JobClaim
from deadpool.membership.registry import Registry
from deadpool.membership.store import (
    KeyRange,
    KeyValue,
    LeaseId,
    Write,
    is_empty,
    is_modified_at,
    prefix_range,
)

CLAIM_LIMIT_S = 300.0
"""For a claim in all while the store fails again and again: as long as a job that forms waits for etcd."""

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_T = TypeVar("_T")
_EXPIRY_LAG_S = 2.0  # etcd deletes the keys of an ended lease up to 0.5 s late, later under load
_ROUNDING_S = 1.0  # etcd tells whole seconds left to a lease, rounded down


def claim_job(
    registry: Registry,
    claim: JobClaim,
    ttl_s: float,
    *,
    clock: Callable[[], float] = boottime_s,
    pause: Callable[[float], object] | None = None,
) -> JobClaim:
    """Claim the job id, or join the job that has it; delete the leftovers of a dead one.

    Takes one round trip for a new job, and for agents launched together (equal `run_id`). Otherwise it waits
    for a proof of life or death, at most one TTL. A store that does not answer is asked again for one TTL;
    once it answers, waiting for a proof begins anew. A store that fails again and again would keep both from
    ending: no failure is forgiven after `CLAIM_LIMIT_S`.

    Args:
        registry: of the job id.
        claim: who we are. `run_id` is equal for all agents of one launch and never used again; "" if there is
            no such thing, then an agent joins while the job has fewer than `n_members` members.
        ttl_s: TTL of this job's leases.
        clock: seconds, for the wait.
        pause: waits that many seconds between two looks.

    Returns:
        The claim that holds: ours, or that of the job we joined.

    Raises:
        ConfigError: a live job has this id.
        StoreUnavailable: the store has not answered for one TTL, or still fails after `CLAIM_LIMIT_S`.
    """
    wait = pause or threading.Event().wait
    sight = _Sight(registry=registry, clock=clock, began_s=clock(), patience_s=ttl_s)
    began_s = answered_s = clock()
    has_warned = False
    while True:
        try:
            claimed = _look(registry, claim, sight)
        except StoreUnavailable as error:
            if clock() - answered_s >= ttl_s or clock() - began_s >= CLAIM_LIMIT_S:
                raise
            if not has_warned:
                _log.warning("claiming the job id %r failed; it is tried again: %s", registry.job_id, error)
                has_warned = True
            # No lease could be renewed meanwhile: what was seen before proves nothing any more.
            sight = _Sight(registry=registry, clock=clock, began_s=clock(), patience_s=ttl_s)
        else:
            if claimed is not None:
                return claimed
            answered_s = clock()
        wait(_POLL_S)


def _look(registry: Registry, claim: JobClaim, sight: _Sight) -> JobClaim | None:
    """Look once at what the id holds and claim it, or join, if that is certain; None while it is not."""
    pairs, _ = registry.store.get_prefix(registry.prefix)
    held = _find(pairs, registry.job_key, JobClaim)
    if held is None:
        # Agents claim before they write anything else: without a claim, what is left is of the past.
        if sight.is_alive(pairs):
            raise _refusal(registry, "a job that is being erased but has members that stay. End them")
        if not any(pair.lease for pair in pairs) and _write_claim(registry, claim, held_revision=0):
            return claim
        return None
    found, revision = held
    if found == claim:
        return found  # with our own token: an earlier try whose answer was lost
    joined = _join(registry, claim, found, pairs, sight)
    if joined is not None:
        return joined
    if sight.is_dead(pairs) and _write_claim(registry, claim, held_revision=revision):
        return claim
    return None


def _join(
    registry: Registry, claim: JobClaim, found: JobClaim, pairs: list[KeyValue], sight: _Sight
) -> JobClaim | None:
    """Join the job that has the id, or refuse, once either is certain; None while it is not."""
    if claim.run_id and claim.run_id == found.run_id:
        return found
    may_be_ours = not claim.run_id or not found.run_id
    n_members = sum(pair.key.startswith(registry.members_prefix) for pair in pairs)
    view = _find(pairs, registry.view_key, View)
    if may_be_ours and view is None and n_members < found.n_members:
        return found  # it is still gathering
    if not sight.is_alive(pairs):
        return None
    if may_be_ours and n_members < found.n_members and not _has_ended(pairs, registry):
        return found
    raise _refusal(
        registry,
        f"a live job ({n_members} of {found.n_members} members, started by {found.claimed_by}). End it first",
    )


def _refusal(registry: Registry, owner_and_remedy: str) -> ConfigError:
    return ConfigError(
        [f"job id {registry.job_id!r} belongs to {owner_and_remedy}, or choose another --job-id"]
    )


@dataclass(slots=True, kw_only=True)
class _Sight:
    """What repeated looks at the leases of a job have shown."""

    registry: Registry
    clock: Callable[[], float]
    began_s: float
    patience_s: float
    first: dict[LeaseId, tuple[float, float]] = field(default_factory=dict)  # lease -> (when, seconds left)
    looks: int = 0

    def is_alive(self, pairs: list[KeyValue]) -> bool:
        """Whether some lease was renewed, or granted, since the first look."""
        self.looks += 1
        for lease in sorted({pair.lease for pair in pairs if pair.lease}):
            asked_s = self.clock()
            left_s = self.registry.store.lease_remaining_s(lease)
            if lease not in self.first:
                self.first[lease] = (self.clock(), left_s)
                self.patience_s = max(self.patience_s, left_s)
                if self.looks > 1 and left_s > 0:
                    return True
            when_s, first_left_s = self.first[lease]
            unrenewed_s = (
                first_left_s + _ROUNDING_S - (asked_s - when_s)
            )  # what it can have without a renewal
            if left_s > max(0.0, unrenewed_s) or unrenewed_s < -_EXPIRY_LAG_S:
                return True
        return False

    def is_dead(self, pairs: list[KeyValue]) -> bool:
        """Whether nobody renewed for long enough."""
        if any(pair.lease for pair in pairs):
            return False
        if _has_ended(pairs, self.registry):
            return True  # nobody comes back to a job that has published its end
        return self.clock() >= self.began_s + self.patience_s + _ROUNDING_S


def _has_ended(pairs: list[KeyValue], registry: Registry) -> bool:
    view = _find(pairs, registry.view_key, View)
    return view is not None and view[0].phase in (Phase.FINISHED, Phase.HALTED)


def _write_claim(registry: Registry, claim: JobClaim, held_revision: int) -> bool:
    """Write our claim and delete all else, unless somebody was faster or a member came back."""
    after_job_key = KeyRange(start=registry.job_key + "\0", end=prefix_range(registry.prefix).end)
    return (
        registry.store.transaction(
            [is_modified_at(registry.job_key, held_revision), is_empty(registry.members_prefix)],
            [Write(key=registry.job_key, value=msgspec.json.encode(claim))],
            [KeyRange(start=registry.prefix, end=registry.job_key), after_job_key],
        )
        is not None
    )


def _find(pairs: list[KeyValue], key: str, kind: type[_T]) -> tuple[_T, int] | None:
    for pair in pairs:
        if pair.key == key:
            return decode_record(pair, kind), pair.mod_revision
    return None
