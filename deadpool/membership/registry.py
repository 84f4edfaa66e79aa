"""The records of one job in the membership store: their keys, their encoding, and the guards of each write.

Keys, under /deadpool/<job id>/:
    job                             the claim: who this job is; written once, by the first agent
    members/<member>                lives with the member's lease
    leader                          lives with the leader's lease; its create revision is the term
    view                            written by the leader only, by compare-and-swap
    acks/<generation>/<phase>/<member>   faults/<generation>/<member>   finished/<generation>/<member>
    fenced/<member>   quarantine/<host>
    recoveries                      summaries of the newest ones, in one key, so that a long job adds none
Generations in keys have ten digits, so that older ones are one range.

[Note: two kinds of missing key]
    A member's key that is gone means that its lease ended: the host died, or etcd was away for longer than
    the TTL. A View never goes away while its job lives. The job is dead only if NOBODY enrols for a whole TTL
    (`claim.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from deadpool.core.types import Ack, Fault, Member, MemberId, View
from deadpool.errors import Fenced, LeaseLost, MembershipError, StoreUnavailable
from deadpool.membership._events import decode_or_warn, decode_record, to_registry_event
from deadpool.membership.records import (
    FencedMember,
    Finished,
    JobClaim,
    Leader,
    Quarantine,
    RegistryEvent,
    Term,
)
from deadpool.membership.store import (
    Compare,
    KeyRange,
    KeyValue,
    Lease,
    MembershipStore,
    Watch,
    WatchEvent,
    Write,
    is_absent,
    is_created_at,
    is_empty,
    is_modified_at,
    is_present,
    prefix_range,
)

ROOT = "/deadpool/"
_DETAIL_CHARS = 16 << 10
"""A fault's traceback is cut to its end: many hosts fail at once, and etcd holds it for every watcher."""

RECOVERIES_KEPT = 100
"""Summaries of the newest recoveries that status can show; the event logs have all."""

_log = logging.getLogger(__name__)
_encode = msgspec.json.encode
_T = TypeVar("_T")


class Registry:
    """Typed access to the records of one job. Holds no state but the names; safe from several threads."""

    def __init__(self, store: MembershipStore, job_id: str) -> None:
        self.store = store
        self.job_id = job_id
        self.prefix = f"{ROOT}{job_id}/"
        self.members_prefix = f"{self.prefix}members/"
        self.job_key = f"{self.prefix}job"
        self.view_key = f"{self.prefix}view"
        self._leader_key = f"{self.prefix}leader"

    def claim(self) -> tuple[JobClaim | None, int]:
        """Who this job is, and the revision of that record; (None, 0) if nobody has claimed the id."""
        pair = self.store.get(self.job_key)
        return (None, 0) if pair is None else (decode_record(pair, JobClaim), pair.mod_revision)

    def is_job_of(self, token: str, when: str) -> Compare:
        """The guard that the job is still the one with this token.

        Args:
            token: of the job that a host belongs to.
            when: it ended, if it did, as that host sees it: "before ..."; for the message.

        Raises:
            Fenced: it is not.
        """
        claim, revision = self.claim()
        over = f"job {self.job_id} has ended, or its records were erased, {when}"
        if claim is None:
            raise Fenced(f"{over}; to run it again, start all its hosts anew")
        if claim.token != token:
            remedy = "start this host anew to join that, or choose another --job-id"
            raise Fenced(f"{over}, and {claim.claimed_by} has begun another one under this id; {remedy}")
        return is_modified_at(self.job_key, revision)

    # Members

    def register(self, member: Member, lease: Lease, token: str) -> None:
        """Enrol a new incarnation.

        Args:
            member: the incarnation.
            lease: what its record lives with.
            token: of the job it was made for. Between the claim and this, workers load for seconds: the job
                may have ended, and a host that came behind its end would form it anew, from the first step.

        Raises:
            Fenced: that job is over.
            MembershipError: the id is taken; an incarnation registers once.
        """
        key = self._member_key(member.id)
        write = Write(key=key, value=_encode(member), lease=lease.id)
        late = "before this host had joined it"
        guards = [self.is_job_of(token, late), is_absent(key), is_absent(self._fenced_key(member.id))]
        if self.store.transaction(guards, [write]) is None:
            self.is_job_of(token, late)
            found = self.store.get(key)
            if found is None or found.lease != lease.id:  # else: an earlier try whose answer was lost
                raise MembershipError(f"member id {member.id} is already registered in job {self.job_id}")

    def register_again(self, member: Member, lease: Lease, token: str, *, holds_slot: bool) -> None:
        """Enrol the same incarnation with a new lease, after the store ended the one before.

        A member that held a slot may only come back if the View still lists it: otherwise it was replaced
        meanwhile.

        Args:
            member: as registered before.
            lease: the new lease.
            token: of the job it was made for.
            holds_slot: whether the newest View this agent obeyed has it in a slot, or leaving.

        Raises:
            Fenced: the member was replaced, or its job is gone.
        """
        write = Write(key=self._member_key(member.id), value=_encode(member), lease=lease.id)
        fenced_key = self._fenced_key(member.id)
        while True:
            fenced = self.store.get(fenced_key)
            if fenced is not None:
                reason = decode_record(fenced, FencedMember).reason
                raise Fenced(f"member {member.id} was fenced: {reason}")
            is_job = self.is_job_of(token, f"while member {member.id} had no lease")
            view, revision = self.view()
            if holds_slot and view is None:
                raise Fenced(f"job {self.job_id} has no View any more; member {member.id} must end")
            if holds_slot and view is not None and member.id not in (*view.slots, *view.leaving):
                raise Fenced(
                    f"member {member.id} was replaced while its lease had ended (View of generation "
                    f"{view.generation}: {view.reason}); it must write nothing more"
                )
            guards = [is_job, is_modified_at(self.view_key, revision), is_absent(fenced_key)]
            if self.store.transaction(guards, [write]) is not None:
                return

    def members(self) -> tuple[Member, ...]:
        """Members whose lease is good, in order of registration."""
        pairs, _ = self.store.get_prefix(self.members_prefix)
        ordered = sorted(pairs, key=lambda pair: pair.create_revision)
        found = (decode_or_warn(pair, Member) for pair in ordered)
        return tuple(member for member in found if member is not None)

    def fence(self, member_id: MemberId, reason: str, term: Term, *, quarantine: bool = False) -> bool:
        """End this incarnation for good: it writes no more and cannot enrol again. Safe to repeat.

        One transaction, guarded by the term: a leader that was succeeded unawares may take for a spare whom
        the next View holds. The member's own revision is no guard. What it writes to enrol again is either
        in before, and deleted here whatever lease it has, or refused for the mark that stays.

        Args:
            member_id: whom; the leader itself loses its leadership by it.
            reason: a sentence for the operator, and for the agent itself.
            term: as returned by `campaign`.
            quarantine: also keep its host out of further placement.

        Returns:
            False if this term leads no more; nothing was done then.

        Raises:
            StoreUnavailable: it may have been done all the same.
        """
        key = self._member_key(member_id)
        pair = self.store.get(key)
        fenced = FencedMember(member=member_id, reason=reason)
        writes = [Write(key=self._fenced_key(member_id), value=_encode(fenced))]
        if quarantine:
            # Without its record, the host is told by the id: its label, a hyphen, random digits.
            member = None if pair is None else decode_or_warn(pair, Member)
            host = member_id.rpartition("-")[0] if member is None else member.host
            writes.append(self._quarantining(Quarantine(host=host, member=member_id, reason=reason)))
        guards = [is_created_at(self._leader_key, term)]
        if not self._write_again_if_unheard(guards, writes, [KeyRange(start=key)]):
            return False
        if pair is not None and pair.lease:
            self.store.lease_revoke(pair.lease)
        return True

    def evict(self, member_id: MemberId) -> bool:
        """End the lease of a member whose silence is confirmed, so that nobody waits for it to run out.

        Any member may do it. It takes the leadership of that member with it; unlike `fence` it is no verdict.
        Returns False if it has no lease any more.
        """
        pair = self.store.get(self._member_key(member_id))
        if pair is None:
            return False
        self.store.lease_revoke(pair.lease)
        return True

    # Leadership and View

    def campaign(self, member_id: MemberId, lease: Lease) -> Term | None:
        """Become leader if there is none.

        Returns:
            The term, also if this member leads already with this lease; None if another member leads.
        """
        value = _encode(Leader(member=member_id))
        write = Write(key=self._leader_key, value=value, lease=lease.id)
        try:
            # A member that is not enrolled cannot lead: it may have been replaced.
            term = self.store.transaction(
                [is_absent(self._leader_key), is_present(self._member_key(member_id))], [write]
            )
        except StoreUnavailable:
            term = None  # it may have been applied; the reading below tells, or raises
        if term is not None:
            return term
        found = self.store.get(self._leader_key)
        if found is not None and found.value == value and found.lease == lease.id:
            return found.create_revision
        return None

    def leader(self) -> tuple[MemberId, Term] | None:
        """Who leads, and its term."""
        pair = self.store.get(self._leader_key)
        return None if pair is None else (decode_record(pair, Leader).member, pair.create_revision)

    def publish_view(self, view: View, expected_revision: int, term: Term) -> int | None:
        """Replace the View, if it is still the one that was read and this term still leads.

        Args:
            view: the new View.
            expected_revision: revision of the View it was decided upon; 0 for the first.
            term: as returned by `campaign`.

        Returns:
            The revision of the new View, or None if either guard failed: read again before deciding again.
        """
        value = _encode(view)
        guards = [is_modified_at(self.view_key, expected_revision), is_created_at(self._leader_key, term)]
        try:
            return self.store.transaction(guards, [Write(key=self.view_key, value=value)])
        except StoreUnavailable:
            # Perhaps it was applied and only the answer was lost. If so it must not be published a second
            # time.
            found = self.store.get(self.view_key)
            if found is not None and found.mod_revision > expected_revision and found.value == value:
                return found.mod_revision
            raise

    def view(self) -> tuple[View | None, int]:
        """The View and its revision; (None, 0) before the first."""
        pair = self.store.get(self.view_key)
        return (None, 0) if pair is None else (decode_record(pair, View), pair.mod_revision)

    # Reports of members

    def put_ack(self, ack: Ack) -> None:
        """Record an ack; a repetition replaces it.

        Raises:
            LeaseLost: the member is not registered (any more): only registered members write. Try again once
            it is.
        """
        self._put_as_member(ack.member, f"acks/{_digits(ack.generation)}/{ack.phase.value}/{ack.member}", ack)

    def put_fault(self, fault: Fault) -> None:
        """Record a fault; a later one of the same member and generation replaces it. Raises as `put_ack`."""
        short = replace(fault, detail=fault.detail[-_DETAIL_CHARS:])
        self._put_as_member(fault.member, f"faults/{_digits(fault.generation)}/{fault.member}", short)

    def put_finished(self, member_id: MemberId, generation: int) -> None:
        """Record that all ranks of a member finished. Raises as `put_ack`."""
        finished = Finished(member=member_id, generation=generation)
        self._put_as_member(member_id, f"finished/{_digits(generation)}/{member_id}", finished)

    def acks(self, generation: int) -> tuple[Ack, ...]:
        """All acks of one generation."""
        return self._list(f"acks/{_digits(generation)}/", Ack)

    def faults(self, generation: int) -> tuple[Fault, ...]:
        """All faults of one generation."""
        return self._list(f"faults/{_digits(generation)}/", Fault)

    def finished(self, generation: int) -> tuple[MemberId, ...]:
        """Members that finished in one generation."""
        return tuple(each.member for each in self._list(f"finished/{_digits(generation)}/", Finished))

    # What outlives a generation

    def put_quarantine(self, quarantine: Quarantine) -> None:
        """Keep a host out of further placement."""
        write = self._quarantining(quarantine)
        self.store.put(write.key, write.value)

    def readmit(self, host: str) -> bool:
        """Take a host back into placement; False if it was not quarantined."""
        key = f"{self.prefix}quarantine/{host}"
        return self.store.transaction([is_present(key)], deletes=[KeyRange(start=key)]) is not None

    def quarantined(self) -> tuple[Quarantine, ...]:
        return self._list("quarantine/", Quarantine)

    def put_recovery(self, generation: int, summary: Mapping[str, Any]) -> None:
        """Keep the summary of a recovery for status; the newest RECOVERIES_KEPT stay. Safe to repeat."""
        key = f"{self.prefix}recoveries"
        mine = {**summary, "generation": generation}
        while True:
            pair = self.store.get(key)
            older = [each for each in self._recoveries_in(pair) if each["generation"] != generation]
            guard = is_modified_at(key, 0 if pair is None else pair.mod_revision)
            write = Write(key=key, value=_encode([*older, mine][-RECOVERIES_KEPT:]))
            if self.store.transaction([guard], [write]) is not None:
                return  # otherwise another leader wrote at the same moment

    def recoveries(self) -> tuple[dict[str, Any], ...]:
        """Summaries of the newest recoveries, each with its generation, oldest first."""
        return tuple(self._recoveries_in(self.store.get(f"{self.prefix}recoveries")))

    @staticmethod
    def _recoveries_in(pair: KeyValue | None) -> list[dict[str, Any]]:
        return [] if pair is None else (decode_or_warn(pair, list[dict[str, Any]]) or [])

    # Clean-up

    def clean(self, before_generation: int) -> None:
        """Delete acks, faults and finish records of older generations."""
        folders = (f"{self.prefix}{folder}/" for folder in ("acks", "faults", "finished"))
        ranges = [
            KeyRange(start=f"{folder}{_digits(0)}", end=f"{folder}{_digits(before_generation)}")
            for folder in folders
        ]
        self.store.transaction([], deletes=ranges)

    def erase(self) -> None:
        """Delete everything of this job."""
        self.store.delete_prefix(self.prefix)

    def erase_if_last(self, token: str) -> bool:
        """Delete everything of this job if no member is left; call it after ending the own lease.

        A new job, with another token, may have claimed the id by then; it has no member yet, and stays.
        """
        claim, revision = self.claim()
        if claim is None or claim.token != token:
            return False
        guards = [is_modified_at(self.job_key, revision), is_empty(self.members_prefix)]
        return self.store.transaction(guards, deletes=[prefix_range(self.prefix)]) is not None

    # Watching

    def watch(self, on_event: Callable[[RegistryEvent], None]) -> Watch:
        """Report all records in order of writing, then StoreReached, then every change.

        `on_event` runs on a thread of the watch: hand over and return. Records of an unknown form are logged
        and left out.
        """

        def report(event: WatchEvent) -> None:
            made = to_registry_event(event, self.prefix)
            if made is not None:
                on_event(made)

        return self.store.watch(self.prefix, report)

    def _member_key(self, member_id: MemberId) -> str:
        return f"{self.members_prefix}{member_id}"

    def _fenced_key(self, member_id: MemberId) -> str:
        return f"{self.prefix}fenced/{member_id}"

    def _put_as_member(self, member_id: MemberId, key: str, record: object) -> None:
        write = Write(key=f"{self.prefix}{key}", value=_encode(record))
        if not self._write_again_if_unheard([is_present(self._member_key(member_id))], [write]):
            raise LeaseLost(
                f"member {member_id} is not registered in job {self.job_id}; {key} was not written"
            )

    def _quarantining(self, quarantine: Quarantine) -> Write:
        return Write(key=f"{self.prefix}quarantine/{quarantine.host}", value=_encode(quarantine))

    def _write_again_if_unheard(
        self, guards: Sequence[Compare], writes: Sequence[Write], deletes: Sequence[KeyRange] = ()
    ) -> bool:
        """Whether the guards held. For what does no harm twice: it is sent again if no answer came."""
        try:
            return self.store.transaction(guards, writes, deletes) is not None
        except StoreUnavailable:
            return self.store.transaction(guards, writes, deletes) is not None

    def _list(self, folder: str, kind: type[_T]) -> tuple[_T, ...]:
        pairs, _ = self.store.get_prefix(f"{self.prefix}{folder}")
        found = (decode_or_warn(pair, kind) for pair in pairs)
        return tuple(record for record in found if record is not None)


def _digits(generation: int) -> str:
    return f"{generation:010d}"
