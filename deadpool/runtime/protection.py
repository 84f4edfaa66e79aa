"""Drives named capture on one host: core's commit machines in, copies and messages out.

The follower's side runs on every host with a slot, the leader's side on the agent that leads. All on the
agent's main thread; the replicator's threads hand over through `post`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from deadpool.core import bitset, commit, follow
from deadpool.core.lag import Lag, note_committed, note_finished
from deadpool.core.placement import held_slots
from deadpool.core.types import MemberId, Name, View
from deadpool.runtime.messages import Captured, CaptureStep, Refused, Relay, WithdrawStep
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.replication import ATTEMPTS
from deadpool.store.segment import SegmentKind
from deadpool.store.transport import timeout_for

logger = logging.getLogger(__name__)

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (commit.BanksRequest, commit.BanksReport, commit.Naming, commit.Report)
}


class Pusher(Protocol):
    """What protection needs of the replicator."""

    def push(self, rank: int, name: Name, bank: int, holders: Sequence[MemberId], keep: Name | None) -> None:
        """Send a complete own bank to its holders; held or failed is told later."""

    def stop(self, rank: int, bank: int) -> None:
        """Stop what reads that bank; returns once nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectionCallbacks:
    """What protection asks of the agent; all on the main thread."""

    send: Callable[[MemberId, Relay], None]  # to a member, possibly this one
    leader: Callable[[], MemberId]  # who leads, "" if nobody is known to
    tell_worker: Callable[[int, CaptureStep | WithdrawStep], None]  # rank, message
    finished_step: Callable[[int], int]  # rank -> newest boundary, from its page
    committed: Callable[[Name], None]  # protected up to this name now
    refused: Callable[[int, int, str, bool], None]  # rank, step, why, whether every later step is, too
    failed: Callable[[int, int, str], None]  # rank, step, why its copy does not reach a holder
    # What is protected, the newest step, seconds of training between, whether this host speaks for all.
    unprotected: Callable[[Name | None, int, float, bool], None]
    held: Callable[[int, Name], None]  # the holders of rank have it


class Protection:
    """Protects the ranks of this host in one generation at a time.

    Args:
        member: this incarnation.
        store: host memory store.
        pusher: sends copies to holders.
        callbacks: see ProtectionCallbacks.
        clock: seconds.
    """

    def __init__(
        self,
        member: MemberId,
        store: HostMemoryStore,
        pusher: Pusher,
        callbacks: ProtectionCallbacks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.protected: Name | None = None
        self.protected_since_s = 0.0
        self._member = member
        self._store = store
        self._pusher = pusher
        self._callbacks = callbacks
        self._view: View | None = None
        self._follower: follow.FollowState | None = None
        self._leader: commit.LeadState | None = None
        self._term = 0
        self._held: dict[int, set[Name]] = {}
        self._clock = clock
        self._lag = Lag(step=0, step_s=0.0, delivery_s=0.0)

    # ---- life ----------------------------------------------------------------------------------------

    def start(self, view: View, rollback: Name) -> None:
        """Protect from now on: `rollback` is complete in an own bank of every own rank."""
        self._view = view
        slot = view.slots.index(self._member)
        own = view.ranks_of_slot(slot)
        ranks = tuple(self._rank_banks(rank) for rank in own)
        mine = {rank for held in held_slots(view, self._member) for rank in view.ranks_of_slot(held)}
        retired = tuple(
            copies.rank
            for copies in self._store.inventory(verify=False).copies
            if copies.held and copies.rank not in mine
        )
        self._follower, effects = follow.start_follow(
            generation=view.generation, rollback=rollback, ranks=ranks, retired=retired, term=self._term
        )
        self._lag = Lag(
            step=rollback.step,
            step_s=self._clock(),
            delivery_s=ATTEMPTS * max(self._delivery_s(rank) for rank in own),
            usual_s=self._lag.usual_s,
        )
        self._carry_out(effects)

    def lead(self, view: View, rollback: Name, term: int) -> None:
        """Lead the naming of this generation."""
        self._view = view
        self._leader, effects = commit.start_lead(
            generation=view.generation,
            term=term,
            world_size=view.world_size,
            rollback=rollback,
            now_s=self._clock(),
        )
        self._carry_out_lead(effects)

    def is_leading(self, generation: int, term: int) -> bool:
        state = self._leader
        return state is not None and (state.generation, state.term) == (generation, term)

    def stop(self) -> None:
        """The generation is over: whatever is under way counts no more."""
        if self._follower is not None:
            self._term = self._follower.term
        self._follower = None
        self._leader = None
        self._held.clear()
        self.protected = None  # until the rollback step is complete on every owner and holder again

    def tick(self) -> None:
        if self._leader is not None:
            self._feed_leader(commit.LeadTick(now_s=self._clock()))
        self._check_lag()

    # ---- events --------------------------------------------------------------------------------------

    def relayed(self, relay: Relay) -> None:
        """A commit message from another agent, or from this one."""
        kind = _KINDS.get(relay.kind)
        if kind is None:
            return
        try:
            message = msgspec.msgpack.decode(relay.body, type=kind)
        except msgspec.MsgspecError as error:
            logger.warning("%s: a %s that cannot be read: %s", relay.sender, relay.kind, error)
            return
        if isinstance(message, commit.BanksReport | commit.Report):
            self._feed_leader(message)
            if isinstance(message, commit.Report) and message.kind is commit.ReportKind.REFUSED:
                self.tick()  # the next step is named at once: a short step does not wait for the clock
        else:
            self._note_boundaries()
            self._feed(message)

    def captured(self, rank: int, message: Captured) -> None:
        state = self._follower
        if state is not None and message.name.generation == state.generation:
            self._feed(follow.Captured(rank=rank, step=message.name.step, bank=message.bank))

    def refused(self, rank: int, message: Refused) -> None:
        state = self._follower
        if state is not None and message.generation == state.generation:
            self._callbacks.refused(rank, message.step, message.why, message.is_lasting)
            self._feed(follow.CaptureRefused(rank=rank, step=message.step, at_step=message.at_step))

    def holder_acked(self, rank: int, name: Name) -> None:
        if self._follower is None:
            return  # a late answer to a push of an older generation says nothing about the new holder
        self._held.setdefault(rank, set()).add(name)
        self._feed(follow.HolderAcked(rank=rank, name=name))
        self._callbacks.held(rank, name)

    def replication_failed(self, rank: int, name: Name, why: str) -> None:
        self._callbacks.failed(rank, name.step, why)
        self._callbacks.refused(rank, name.step, why, False)
        self._feed(follow.ReplicationFailed(rank=rank, name=name))

    # ---- the machines --------------------------------------------------------------------------------

    def _rank_banks(self, rank: int) -> follow.RankBanks:
        infos = self._store.banks(rank, SegmentKind.OWN)
        names = tuple(info.complete_name for info in infos)
        assert len(names) == 2, f"rank {rank} has no segment on its own host"
        return follow.RankBanks(
            rank=rank, own=(names[0], names[1]), held=tuple(sorted(self._held.get(rank, ())))
        )

    def _delivery_s(self, rank: int) -> float:
        """The limit of one attempt to deliver a copy."""
        segment = self._store.own(rank)
        assert segment is not None
        return timeout_for(segment.layout.blob_capacity + segment.layout.unique_bytes)

    def _check_lag(self) -> None:
        """Say that steps are finished and none is committed; rank 0's host speaks for all."""
        state = self._follower
        if state is None or self._view is None:
            return
        step = max(self._callbacks.finished_step(rank.rank) for rank in state.ranks)
        self._lag = note_finished(self._lag, step, self._clock())
        if self._lag.is_late:
            is_first = self._view.slots[0] == self._member
            self._callbacks.unprotected(self.protected, step, self._lag.behind_s, is_first)

    def _note_boundaries(self) -> None:
        state = self._follower
        if state is None:
            return
        for rank in state.ranks:
            step = self._callbacks.finished_step(rank.rank)
            if step > rank.at_step:
                self._feed(follow.BoundaryPassed(rank=rank.rank, step=step))

    def _feed(self, event: follow.FollowEvent) -> None:
        if self._follower is None:
            return
        self._follower, effects = follow.follow(self._follower, event)
        if self._follower.committed is not None:
            self._note_committed(self._follower.committed)
        self._carry_out(effects)

    def _feed_leader(self, event: commit.LeadEvent) -> None:
        if self._leader is None:
            return
        self._leader, effects = commit.lead(self._leader, event)
        self._carry_out_lead(effects)

    def _carry_out(self, effects: Sequence[follow.FollowEffect]) -> None:
        state = self._follower
        assert state is not None
        for effect in effects:
            match effect:
                case follow.StopStream(rank=rank, bank=bank):
                    self._pusher.stop(rank, bank)
                case follow.PassNaming():
                    self._callbacks.tell_worker(
                        effect.rank,
                        CaptureStep(
                            generation=state.generation,
                            step=effect.step,
                            bank=effect.bank,
                            committed_step=effect.committed.step if effect.committed else -1,
                        ),
                    )
                case follow.Withdraw(rank=rank, step=step):
                    self._callbacks.tell_worker(rank, WithdrawStep(generation=state.generation, step=step))
                case follow.Replicate():
                    self._pusher.push(
                        effect.rank, effect.name, effect.bank, self._holders(effect.rank), effect.keep
                    )
                case follow.SendReport(report=report):
                    self._send(self._callbacks.leader(), report)
                case follow.SendBanks(report=banks):
                    self._send(self._callbacks.leader(), banks)
                case follow.EmptyHeld(rank=rank):
                    self._store.empty_held(rank)

    def _carry_out_lead(self, effects: Sequence[commit.LeadEffect]) -> None:
        for effect in effects:
            match effect:
                case commit.AskBanks(request=request, ranks=ranks):
                    self._send_to_ranks(ranks, request)
                case commit.SendNaming(naming=naming, ranks=ranks):
                    self._send_to_ranks(ranks, naming)
                case commit.Committed(name=name):
                    self._note_committed(name)

    def _note_committed(self, name: Name) -> None:
        if name != self.protected:
            self.protected = name
            self._held = {
                rank: {held for held in names if held >= name} for rank, names in self._held.items()
            }
            self.protected_since_s = self._clock()
            self._lag = note_committed(self._lag)
            self._callbacks.committed(name)

    def _holders(self, rank: int) -> tuple[MemberId, ...]:
        assert self._view is not None
        slots = self._view.holders[self._view.slot_of_rank(rank)] if self._view.holders else ()
        return tuple(self._view.slots[slot] for slot in slots)

    def _send_to_ranks(self, ranks: int, message: commit.BanksRequest | commit.Naming) -> None:
        assert self._view is not None
        members = {self._view.member_of_rank(rank) for rank in bitset.items(ranks)}
        for member in sorted(members):
            self._send(member, message)

    def _send(
        self,
        member: MemberId,
        message: commit.BanksRequest | commit.Naming | commit.Report | commit.BanksReport,
    ) -> None:
        if not member:
            return  # nobody leads now; the next leader asks
        relay = Relay(
            sender=self._member,
            generation=message.generation,
            kind=type(message).__name__,
            body=msgspec.msgpack.encode(message),
        )
        self._callbacks.send(member, relay)
