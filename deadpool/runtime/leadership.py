"""Who leads, and leading when it is this agent. On the agent's main thread.

A leader that fails to write is dropped and campaigns again: elected once more, it decides anew from what the
store says, so that no decision lives on that was not published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from deadpool.config import Config
from deadpool.core import membership
from deadpool.core.silence import Silences
from deadpool.core.types import MemberId, Name, Phase, View
from deadpool.errors import LeaseLost, SnapshotError, StoreUnavailable
from deadpool.events import EventLog
from deadpool.membership.records import Term
from deadpool.membership.registry import Registry
from deadpool.membership.store import Lease
from deadpool.runtime.growth import Growth
from deadpool.runtime.leader import Leader, LeadershipLost
from deadpool.runtime.messages import Silent
from deadpool.runtime.writer import RegistryWriter

logger = logging.getLogger(__name__)

RETRY_S = 0.5


class Leadership:
    """The leadership key, and the Leader while this agent holds it.

    Args:
        member: this incarnation.
        registry: records of the job.
        writer: for writes that nobody waits for.
        config: configuration of the job.
        log: event log.
        query_stall: asks every host for a stall report of a generation.
        find_checkpoint: the newest complete checkpoint that the job may begin from.
    """

    def __init__(
        self,
        member: MemberId,
        registry: Registry,
        writer: RegistryWriter,
        config: Config,
        log: EventLog,
        query_stall: Callable[[int], None],
        find_checkpoint: Callable[[], Name | None],
    ) -> None:
        self.leader_id: MemberId = ""
        self.leader: Leader | None = None
        self._member = member
        self._registry = registry
        self._writer = writer
        self._config = config
        self._log = log
        self._query_stall = query_stall
        self._find_checkpoint = find_checkpoint
        self._growth = Growth(config.membership.grow_command, config.job.spares > 0, log)
        self._next_try_s = 0.0
        self._ran_with: tuple[MemberId, ...] = ()
        self._stopped_s = 0.0  # when the job left RUNNING; 0 while it runs
        self._replaced: tuple[MemberId, ...] = ()  # by the newest recovery that replaced anybody
        self._silences = Silences()  # judged here only if they concern the leader

    def tick(self, lease: Lease) -> None:
        """Lead on, or campaign if nobody leads."""
        if self.leader is not None:
            self.act(lambda leader: leader.tick())
            self.act(lambda leader: self._growth.tick(leader.state))
            return
        now_s = time.monotonic()
        if now_s < self._next_try_s or self.leader_id not in ("", self._member):
            return
        self._next_try_s = now_s + RETRY_S
        try:
            self._campaign(lease)
        except (StoreUnavailable, LeaseLost, LeadershipLost) as error:
            self._drop(str(error))

    def act(self, what: Callable[[Leader], None]) -> None:
        """Do something as leader; nothing if this agent does not lead."""
        if self.leader is None:
            return
        try:
            what(self.leader)
        except (StoreUnavailable, LeadershipLost, LeaseLost) as error:
            self._drop(str(error))

    def on_leader(self, member: MemberId, term: Term) -> None:
        """The leadership key names somebody."""
        self.leader_id = member
        if self.leader is not None and self.leader.term != term:
            self._drop("another member leads")

    def on_vacant(self) -> None:
        """The leadership key is gone."""
        self.leader_id = ""
        self._drop("the leadership key is gone")
        self._next_try_s = 0.0

    def on_view(self, view: View) -> None:
        """Should this agent come to lead in a recovery, it knows who ran before, and until when."""
        if view.phase is not Phase.RUNNING:
            self._stopped_s = self._stopped_s or time.monotonic()
            return
        self._stopped_s = 0.0
        self._replaced = _without(self._ran_with, view.slots) or self._replaced
        self._ran_with = view.slots

    def late_hosts(self) -> tuple[str, ...]:
        """Hosts for which the phase waits; only the leader knows. Safe from other threads."""
        leader = self.leader
        return () if leader is None else leader.late_hosts()

    def replaced(self, slots: tuple[MemberId, ...]) -> tuple[MemberId, ...]:
        """Members that ran before and are in none of `slots`: of this recovery, or else the one before.

        `deadpool status` names them until the leader's summary does.
        """
        return _without(self._ran_with, slots) or self._replaced

    def on_silent(self, message: Silent) -> None:
        """A silence: the leader judges it; that of the leader itself lets any member end its lease."""
        self._silences = self._silences.say(message.observer, message.silent, message.gone)
        self.act(lambda leader: leader.silent(message.observer, message.silent, message.gone))
        member = self.leader_id
        if self.leader is None and self._silences.is_death(member):
            self._silences = self._silences.without({member})
            self._writer.put(
                message.generation, "eviction of the leader", lambda: self._registry.evict(member)
            )

    def on_member_gone(self, member: MemberId) -> None:
        """A registration is gone; so is the word of who had it."""
        self._silences = self._silences.without({member})
        self.act(lambda leader: leader.lease_expired(member))

    def close(self) -> None:
        """End what was started for the job."""
        self._growth.close()

    def _campaign(self, lease: Lease) -> None:
        term = self._registry.campaign(self._member, lease)
        if term is None:
            return
        job = self._config.job
        leader = Leader(
            self._member,
            self._registry,
            term,
            limits_of(self._config),
            (job.nnodes, job.nproc_per_node),
            self._log,
            query_stall=self._query_stall,
            write=self._writer.put,
        )
        self.leader = leader
        self.leader_id = self._member
        self._log.emit("leader.elected", term=term)
        quarantined = tuple(each.host for each in self._registry.quarantined())
        checkpoint = self._newest_checkpoint()
        leader.start(self._registry.members(), quarantined, checkpoint, self._ran_with, self._stopped_s)

    def _newest_checkpoint(self) -> Name | None:
        """What a job would begin from, or go back to if its memory copies are lost.

        Raises:
            LeadershipLost: that is not known: a job that forms now would begin anew, so it is asked again.
        """
        try:
            return self._find_checkpoint()
        except SnapshotError as error:
            if not self._ran_with:
                logger.warning("the job cannot begin yet: %s", error)
                raise LeadershipLost(str(error)) from error
            logger.warning("the recovery goes on without checkpoints: %s", error)
            return None

    def _drop(self, why: str) -> None:
        if self.leader is not None:
            self._log.emit("leader.lost", term=self.leader.term, reason=why)
            self.leader = None
            self._growth.close()  # the next leader asks anew
            self._next_try_s = time.monotonic() + RETRY_S


def limits_of(config: Config) -> membership.Limits:
    """Limits of the membership machine from the configuration."""
    waits, member = config.communicator, config.membership
    workers_s = waits.close_timeout_s + waits.abort_timeout_s + waits.unwind_timeout_s
    return membership.Limits(
        lease_ttl_s=member.lease_ttl_s,
        forming_s=member.forming_timeout_s,
        suspect_s=member.suspect_s,
        abort_s=workers_s + waits.ack_timeout_s,
        restore_s=waits.rebuild_timeout_s + waits.ack_timeout_s,
        spare_wait_s=member.spare_wait_s,
        replicas=config.store.replication_factor,
        spares=config.job.spares,
    )


def _without(members: tuple[MemberId, ...], slots: tuple[MemberId, ...]) -> tuple[MemberId, ...]:
    return tuple(member for member in members if member and member not in slots)
