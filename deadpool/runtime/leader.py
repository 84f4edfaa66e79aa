"""The leader: feeds the membership machine and carries out what it decides. One agent at a time runs it.

Events come from the registry's watch, from control messages (silence, stalls) and from the clock. The
only effects are a View written by compare-and-swap, a member fenced, both under this leadership, and the end.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from deadpool.core import membership, progress, recovery
from deadpool.core.collectives import RankCalls, find_disagreement
from deadpool.core.types import Ack, Fault, FaultKind, Member, MemberId, Name, View
from deadpool.events import EventLog
from deadpool.membership.records import Term
from deadpool.membership.registry import Registry
from deadpool.runtime.messages import Stalled
from deadpool.runtime.stalls import calls_of, describe_call, ranks_of
from deadpool.runtime.timeline import Timeline

logger = logging.getLogger(__name__)

STALL_COLLECT_S = 1.0  # how long hosts may take to answer a StallQuery
STALL_AGAIN_S = 2.0
"""A stall in which nobody is to blame yet is looked into again after this, and not before: every host answers
every look, and some say on their own what was asked of all.
"""


class LeadershipLost(Exception):
    """Another agent leads, or the View was changed behind this leader's back."""


@dataclasses.dataclass(slots=True)
class _Stall:
    """Reports being collected after a host said that something takes long."""

    generation: int
    deadline_s: float
    is_late: bool = False  # no step for the progress timeout, somewhere: find out whose fault it is
    reports: dict[int, progress.RankProgress] = dataclasses.field(default_factory=dict)
    calls: dict[int, RankCalls] = dataclasses.field(default_factory=dict)
    names: dict[int, str] = dataclasses.field(default_factory=dict)  # of groups

    def is_like(self, later: _Stall) -> bool:
        """Whether some rank has not finished a step since."""
        return any(
            rank in later.reports and later.reports[rank].finished_step == report.finished_step
            for rank, report in self.reports.items()
        )


class Leader:
    """Runs the membership machine while this agent holds the leadership key.

    Args:
        member: this agent.
        registry: records of the job.
        term: this leadership.
        limits: limits of the machine.
        n_slots, nproc: shape of the job.
        log: event log.
        query_stall: asks every host for a stall report of this generation.
        write: queues a write that nobody waits for: (generation, what, the write).
    """

    def __init__(
        self,
        member: MemberId,
        registry: Registry,
        term: Term,
        limits: membership.Limits,
        shape: tuple[int, int],
        log: EventLog,
        query_stall: Callable[[int], None],
        write: Callable[[int, str, Callable[[], object]], None],
    ) -> None:
        self.term = term
        self._member = member
        self._registry = registry
        self._log = log
        self._query_stall = query_stall
        self._write = write
        self._timeline = Timeline(log, self._keep_recovery)
        self._state = membership.initial_state(limits, *shape)
        self._revision = 0
        self._published: View | None = None
        self._stall: _Stall | None = None
        self._stall_again_s = 0.0  # no new look at a stall before
        self._lasting: _Stall | None = None  # the first look at a stall that goes on
        self._was_late = False  # what the newest look was about
        self._disagreement = ""  # what it found
        self.ended: tuple[int, str] | None = None

    @property
    def state(self) -> membership.State:
        return self._state

    @property
    def view(self) -> View | None:
        return self._state.view

    def late_hosts(self) -> tuple[str, ...]:
        """Hosts for which the phase waits. Safe from other threads."""
        return recovery.late_hosts(self._state)

    def start(
        self,
        members: tuple[Member, ...],
        quarantined: tuple[str, ...],
        checkpoint: Name | None,
        ran_with: tuple[MemberId, ...] = (),
        stopped_s: float = 0.0,
    ) -> None:
        """Take over: read the View and everything acked under it.

        Args:
            members: who is registered.
            quarantined: hosts that get no slot.
            checkpoint: the newest complete one.
            ran_with: slots of the View under which this agent last saw the job run.
            stopped_s: monotonic time since when it has not seen it run; 0 if it has.
        """
        view, self._revision = self._registry.view()
        self._feed(
            membership.LeaderElected(
                view=view,
                members=members,
                quarantined=quarantined,
                checkpoint=checkpoint,
                now_s=time.monotonic(),
            )
        )
        if view is not None:
            self._timeline.resume(view, ran_with, stopped_s)
            for fault in self._registry.faults(view.generation):
                self.fault(fault)
            for ack in self._registry.acks(view.generation):
                self.acked(ack)
            for member in self._registry.finished(view.generation):
                self.finished(member, view.generation)

    # ---- events --------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        self._feed(membership.MemberJoined(member=member, now_s=time.monotonic()))

    def lease_expired(self, member: MemberId) -> None:
        self._note_lost(member, "lease_expired")
        self._feed(membership.LeaseExpired(member_id=member, now_s=time.monotonic()))

    def silent(self, observer: MemberId, silent: Sequence[MemberId], gone: Sequence[MemberId]) -> None:
        """All that one observer does not hear now."""
        said = self._state.silences.say(observer, silent, gone)
        for member in (*silent, *gone):
            if said.is_death(member):
                self._note_lost(member, "process_gone" if member in gone else "silence")
        self._feed(
            membership.SilencesHeard(
                observer=observer, silent=tuple(silent), gone=tuple(gone), now_s=time.monotonic()
            )
        )

    def fault(self, fault: Fault) -> None:
        view = self._state.view
        if view is not None and fault.generation == view.generation:
            self._timeline.fault(fault, self._host_of(fault.member))
        self._feed(membership.FaultReported(fault=fault, now_s=time.monotonic()))

    def acked(self, ack: Ack) -> None:
        self._timeline.acked(ack)
        self._feed(membership.Acked(ack=ack, now_s=time.monotonic()))

    def finished(self, member: MemberId, generation: int) -> None:
        self._feed(membership.Finished(member_id=member, generation=generation, now_s=time.monotonic()))

    def stalled(self, message: Stalled) -> None:
        """A host says that something takes long, or answers our query."""
        view, generation = self._state.view, message.generation
        if view is None or generation != view.generation:
            return
        if self._stall is None or self._stall.generation != generation:
            is_news = message.is_late and not self._was_late
            if time.monotonic() < self._stall_again_s and not is_news:
                return
            self._look_into_stall(generation)
        assert self._stall is not None
        stall = self._stall
        stall.is_late |= message.is_late
        stall.reports.update({report.rank: report for report in ranks_of(message)})
        stall.calls.update({report.rank: report for report in calls_of(message)})
        stall.names.update(message.names)
        if len(stall.reports) == view.world_size:
            self._judge_stall()

    def checkpoint_found(self, name: Name) -> None:
        self._feed(membership.CheckpointFound(name=name, now_s=time.monotonic()))

    def readmitted(self, host: str) -> None:
        self._feed(membership.HostReadmitted(host=host, now_s=time.monotonic()))

    def store_returned(self) -> None:
        self._feed(membership.StoreReturned(now_s=time.monotonic()))

    def tick(self) -> None:
        now_s = time.monotonic()
        if self._stall is not None and now_s > self._stall.deadline_s:
            self._judge_stall()
        elif self._stall is None and self._lasting is not None and now_s >= self._stall_again_s:
            self._look_into_stall(self._lasting.generation, is_late=True)
        self._feed(membership.Tick(now_s=time.monotonic()))

    def _look_into_stall(self, generation: int, *, is_late: bool = False) -> None:
        """Ask every host; those that answer in time are judged together."""
        self._stall = _Stall(generation, time.monotonic() + STALL_COLLECT_S, is_late)
        self._query_stall(generation)

    def _judge_stall(self) -> None:
        stall, self._stall = self._stall, None
        first, self._lasting = self._lasting, None
        view = self._state.view
        if stall is None or view is None or stall.generation != view.generation:
            return
        self._stall_again_s = time.monotonic() + STALL_AGAIN_S
        self._was_late = stall.is_late
        self._name_disagreement(stall)
        if not stall.is_late:
            return
        reports = tuple(stall.reports.values())
        culprits = progress.find_culprits(reports)
        if culprits:
            self._log.emit("progress.culprit", generation=view.generation, ranks=list(culprits))
        else:
            first = first if first is not None and first.generation == stall.generation else stall
            self._lasting = first if first.is_like(stall) else None
            if progress.is_waiting(reports):
                step = 1 + max(report.finished_step for report in reports)
                self._feed(membership.AllWait(generation=view.generation, step=step, now_s=time.monotonic()))
        for rank in culprits:
            report = stall.reports[rank]
            why = "its process is stopped" if report.tick_frozen else "it did not join a collective"
            self.fault(
                Fault(
                    kind=FaultKind.WORKER_STUCK,
                    member=view.member_of_rank(rank),
                    generation=view.generation,
                    ranks=(rank,),
                    step=report.finished_step + 1,
                    detail=f"no progress while others wait: {why}",
                )
            )

    def _name_disagreement(self, stall: _Stall) -> None:
        """Say who calls what if ranks wait for one another: nobody is late, so nobody else would be named."""
        found = find_disagreement(tuple(stall.calls.values()))
        text = "; ".join(describe_call(rank, call, stall.names) for rank, call in found)
        if found and text != self._disagreement:
            ranks = sorted({rank for rank, _ in found})
            self._log.emit("collective.disagreement", generation=stall.generation, ranks=ranks, detail=text)
        self._disagreement = text

    def _note_lost(self, member: MemberId, how: str) -> None:
        view = self._state.view
        if view is not None and member in view.slots:
            ranks = tuple(view.ranks_of_slot(view.slots.index(member)))
            self._timeline.lost(member, self._host_of(member), how, ranks)

    def _host_of(self, member: MemberId) -> str:
        return next((each.host for each in self._state.members if each.id == member), "")

    # ---- effects -------------------------------------------------------------------------------------

    def _keep_recovery(self, generation: int, summary: dict[str, Any]) -> None:
        self._write(
            generation, "summary of a recovery", lambda: self._registry.put_recovery(generation, summary)
        )
        self._write(generation, "cleaning up", lambda: self._registry.clean(generation - 1))

    def _feed(self, event: membership.Event) -> None:
        self._state, effects = membership.step(self._state, event)
        # Its own fence last: that costs it the leadership, and nothing behind would be accepted.
        for effect in sorted(effects, key=self._is_own_fence):
            match effect:
                case membership.PublishView(view=view):
                    self._publish(view)
                case membership.Fence():
                    self._fence(effect)
                case membership.End(exit_code=code, reason=reason):
                    self.ended = (code, reason)

    def _is_own_fence(self, effect: membership.Effect) -> bool:
        return isinstance(effect, membership.Fence) and effect.member_id == self._member

    def _fence(self, fence: membership.Fence) -> None:
        member = fence.member_id
        if not self._registry.fence(member, fence.reason, self.term, quarantine=fence.quarantine):
            raise LeadershipLost(f"member {member} was not fenced: another agent leads, or none")
        if fence.quarantine:
            self._log.emit("member.quarantined", subject=member, reason=fence.reason)

    def _publish(self, view: View) -> None:
        before = self._published
        revision = self._registry.publish_view(view, self._revision, self.term)
        if revision is None:
            raise LeadershipLost(f"the View of generation {view.generation} was not accepted")
        self._revision = revision
        self._log.emit(
            "view.published",
            generation=view.generation,
            phase=view.phase.value,
            reason=view.reason,
            slots=list(view.slots),
            joining=list(view.joining),
            leaving=list(view.leaving),
        )
        self._timeline.published(before, view)
        self._published = view
