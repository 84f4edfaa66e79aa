"""The agent: one process per host. It owns the host's copies, workers and lease, and may lead the job.

One main thread carries out everything; watches, connections, streams and children have threads of their
own that only hand over (`_post`). Agent death is host loss: the workers die with it.
"""

from __future__ import annotations

import logging
import queue
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from deadpool.config import Config
from deadpool.core.types import Member, MemberId, Phase, View
from deadpool.errors import DeadPoolError, ExitCode, StoreUnavailable
from deadpool.events import EventLog
from deadpool.membership.etcd import EtcdStore
from deadpool.membership.lease import LeaseKeeper
from deadpool.membership.records import (
    AckPut,
    FaultPut,
    FinishedPut,
    LeaderGone,
    LeaderPut,
    MemberGone,
    MemberPut,
    QuarantineGone,
    RegistryEvent,
    StoreLost,
    StoreReached,
    ViewGone,
    ViewPut,
)
from deadpool.membership.registry import Registry
from deadpool.membership.store import Lease, Watch
from deadpool.runtime.checkpointing import CheckpointCallbacks, CheckpointTier, checkpoint_root
from deadpool.runtime.courier import Courier, Recipients
from deadpool.runtime.cut_off import CutOff
from deadpool.runtime.ending import AgentEnd, Ending, EndingCallbacks, Replaced
from deadpool.runtime.endpoints import etcd_config, own_address
from deadpool.runtime.fetch import Fetcher
from deadpool.runtime.host import Host, HostCallbacks
from deadpool.runtime.leadership import Leadership
from deadpool.runtime.messages import Heartbeat
from deadpool.runtime.parts import HostParts, first_name
from deadpool.runtime.peers import Peers, PeersCallbacks
from deadpool.runtime.protection import Protection, ProtectionCallbacks
from deadpool.runtime.protection_log import ProtectionLog
from deadpool.runtime.push import HolderPusher
from deadpool.runtime.result import note_agent
from deadpool.runtime.servers import Servers, StreamCallbacks
from deadpool.runtime.stalls import Stalls
from deadpool.runtime.starting import Launch, claim_token, describe_member
from deadpool.runtime.status import describe
from deadpool.runtime.waits import LongWaits
from deadpool.runtime.workforce import Worker, WorkerState, Workforce, WorkforceCallbacks
from deadpool.runtime.writer import RegistryWriter
from deadpool.store.host_memory import HostMemoryStore

logger = logging.getLogger(__name__)
TICK_S = 0.1
STOP_WORKERS_S = 5.0
START_STORE_S = 10.0  # an election of etcd, or a handshake while every core of this host is busy


class Agent:
    """One incarnation of one host.

    Args:
        config: configuration of the job.
        run_dir: folder of the run.
        host: label of this host, part of every member id.
        launch: see Launch.
    """

    def __init__(self, config: Config, run_dir: Path, host: str, launch: Launch) -> None:
        self.config = config
        self.run_dir = run_dir
        self.host_label = host
        self.id: MemberId = launch.member or f"{host}-{secrets.token_hex(3)}"
        self._launch = launch
        self.token = launch.token
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        run_id = launch.run_id or config.job.job_id
        self.log = EventLog(run_dir / f"events-{self.id}.jsonl", run_id, self.id, console=self._say)
        self.address = config.run.address or own_address(config.membership)
        self._members: dict[MemberId, Member] = {}
        self._reached = False
        self._has_servers = False
        self.is_member = False  # workers are ready, and what belongs to a member is there
        self._view_revision = 0
        self._build()

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the main thread. From any thread; never blocks."""
        self._queue.put((function, arguments))

    # ---- life ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Live until the job ends; returns the exit code.

        Raises:
            Replaced: this incarnation is over.
            DeadPoolError: it could not start.
        """
        try:
            self._start()
            self._loop()
        except AgentEnd as end:
            return end.code
        finally:
            self._close()
        raise AssertionError("the loop ends by an exception")

    def _build(self) -> None:
        config = self.config
        self.store_client = EtcdStore(etcd_config(config.membership))
        self.registry = Registry(self.store_client, config.job.job_id)
        self.writer = RegistryWriter(lambda what, error: self.post(self.ending.not_written, what, error))
        self.memory = HostMemoryStore(self.id)
        self.leadership = Leadership(
            self.id,
            self.registry,
            self.writer,
            config,
            self.log,
            query_stall=lambda generation: self.courier.query_stall(generation),
            find_checkpoint=lambda: self.checkpoints.find() if config.checkpoint.dir else None,
        )
        self.workforce = Workforce(
            config,
            self.run_dir,
            self.post,
            WorkforceCallbacks(
                message=lambda worker, message: self.host.on_message(worker, message),
                parked=self._on_parked,
                lost=lambda worker, cause: self._on_lost(worker, cause),
                unreaped=lambda worker: self.host.on_unreaped(worker),
                ended=lambda worker, code: self.ending.worker_ended(worker, code),
            ),
        )
        self.ending = Ending(
            self.run_dir,
            self.workforce,
            self.log,
            EndingCallbacks(
                pid_of=lambda member: self._members[member].pid if member in self._members else None,
                protected=lambda: self.protection.protected,
                job_view=lambda: self.host.view if self.is_member else None,
                ranks=lambda: self.host.ranks(),
                needs_view=lambda: self.stalls.is_late or self.host.needs_view(self.peers.hears_none_of),
                unheard=lambda: self.peers.unheard(),
                begun=lambda: self.peers.stop_judging(),
                summarise=self._summarise,
            ),
            config.checkpoint.grace_s,
        )
        self.waits = LongWaits(config, self.log, self.workforce)
        self.stalls = Stalls(self.id, config.liveness, self.workforce, self.log)
        self.cut_off = CutOff(grace_s=config.membership.lease_ttl_s)
        self.lease: LeaseKeeper | None = None
        self.watch: Watch | None = None

    def _start(self) -> None:
        self.store_client.connect(START_STORE_S)
        self.token = claim_token(self.registry, self.config, self._launch, self.host_label)
        self.workforce.start(self.config.job.nproc_per_node)
        self._start_servers()
        self._wait_until_parked()
        self.member = describe_member(
            self.id,
            self.host_label,
            (self.address, self._control_port),
            self.servers,
            self.config,
            self.workforce.versions,
        )
        self._make_parts()
        self.is_member = True
        self.lease = LeaseKeeper(
            self.store_client,
            self.config.membership.lease_ttl_s,
            enrol=self._enrol,
            on_lost=lambda error: self.post(self._on_replaced, str(error)),
        )
        self.lease.start()
        self.log.emit("member.registered", host=self.host_label, granted_ttl_s=self.lease.granted_ttl_s)
        self.watch = self.registry.watch(lambda event: self.post(self._on_registry, event))
        self.log.note(partial(note_agent, self.run_dir, self.id, self.address, self._control_port))
        self.peers.start_watching()

    def _start_servers(self) -> None:
        self.servers = Servers(
            self.address,
            self.token,
            self.memory,
            self.config.store,
            StreamCallbacks(
                address_of=self._data_address,
                held=lambda rank, name: self.post(self._pusher.acked, rank, name),
                failed=lambda rank, name, why: self.post(self.protection.replication_failed, rank, name, why),
            ),
        )
        self.peers = Peers(
            self.id,
            self.address,
            self.token,
            self.config,
            self.log,
            PeersCallbacks(
                post=self.post,
                heartbeat=self._heartbeat,
                message=lambda sender, message: self.courier.on_message(sender, message),
                silent=lambda said: None if self.ending.is_flushing else self.leadership.on_silent(said),
                status=lambda: msgspec.msgpack.encode(describe(self)),
            ),
        )
        self._control_port = self.peers.listen()
        self._has_servers = True

    def _make_parts(self) -> None:
        self.checkpoints = CheckpointTier(
            checkpoint_root(self.config.checkpoint.dir, self.run_dir),
            self.memory,
            self.config.world_size,
            self.log,
            post=self.post,
            callbacks=CheckpointCallbacks(
                written=lambda name, shard: self.courier.shard_written(name, shard),
                completed=lambda name: self.leadership.act(lambda leader: leader.checkpoint_found(name)),
                may_write=lambda: self.ending.may_write(self.lease, self.peers.who_reaches_store()),
            ),
        )
        self.protection_log = ProtectionLog(
            self.log,
            self.config.checkpoint.every,
            save=lambda name, index: self.checkpoints.save_periodic(self.host.ranks(), name, index),
            generation=self._generation,
        )
        self._pusher = HolderPusher(
            self.servers.replicator,
            held=lambda rank, name: self.post(self.protection.holder_acked, rank, name),
        )
        self.protection = Protection(
            self.id,
            self.memory,
            self._pusher,
            ProtectionCallbacks(
                send=lambda member, relay: self.courier.send(member, relay),
                leader=lambda: self.leadership.leader_id,
                tell_worker=self.workforce.tell,
                finished_step=self.workforce.finished_step,
                committed=self.protection_log.committed,
                refused=self.protection_log.refused,
                failed=self.protection_log.failed,
                unprotected=self.protection_log.unprotected,
                held=lambda rank, name: self.host.on_held(rank, name),
            ),
        )
        self.courier = Courier(
            self.id,
            self.peers,
            Recipients(
                protection=self.protection,
                leadership=self.leadership,
                checkpoints=self.checkpoints,
                stalls=self.stalls,
                completer=lambda: self.ending.completer(self.leadership.leader_id),
            ),
            self._generation,
            self.post,
        )
        self.fetcher = Fetcher(self.servers.transport, self.memory, lambda: dict(self._members), self.post)
        self.host = Host(
            self.member,
            self.token,
            HostParts(
                config=self.config,
                run_dir=self.run_dir,
                registry=self.registry,
                writer=self.writer,
                store=self.memory,
                server=self.servers.data,
                workforce=self.workforce,
                protection=self.protection,
                fetcher=self.fetcher,
                checkpoints=self.checkpoints,
                log=self.log,
                stop_streams=self.servers.replicator.set_generation,
            ),
            HostCallbacks(
                members=lambda: self._members,
                replaced=self._on_replaced,
                ended=self.ending.on_view,
                broken=self.ending.give_up,
                rendezvous_generation=self.servers.rendezvous.set_generation,
            ),
        )

    def _enrol(self, lease: Lease, again: bool) -> None:
        holds_slot = self.host.slot is not None
        if again:
            self.registry.register_again(self.member, lease, self.token, holds_slot=holds_slot)
        else:
            self.registry.register(self.member, lease, self.token)

    def _wait_until_parked(self) -> None:
        """Imports and self-test of the workers; only then is this host worth registering."""
        limit_s = self.config.membership.start_timeout_s
        deadline = time.monotonic() + limit_s
        while any(worker.state is WorkerState.STARTING for worker in self.workforce.workers):
            if time.monotonic() > deadline:
                raise DeadPoolError(f"its workers took over {limit_s:g} s (start_timeout_s) to start")
            self.ending.check_signal(None)
            self._take(TICK_S)

    def _loop(self) -> None:
        next_tick_s = 0.0
        while True:
            self._take(TICK_S)
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + TICK_S
                self._tick()

    def _take(self, timeout_s: float) -> None:
        try:
            function, arguments = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return
        function(*arguments)

    def _tick(self) -> None:
        self.ending.check_signal(self.checkpoints)
        self.ending.check_store(self.host.view, self.lease)
        self.workforce.tick()
        self.host.tick()
        self.peers.tick(self.leadership.leader_id, self.host.named())
        self.protection.tick()
        self.checkpoints.tick()
        self._check_lease()
        if self.ending.view is None:
            self.courier.report(self.stalls.check(self.host.view))
        if self.lease and self.lease.reaches_store and self._reached and self.ending.view is None:
            self.leadership.tick(self.lease.lease)  # each try would wait for an etcd that is away
        self._lead_protection()
        self.waits.tick(self.host.view, len(self._members), self.leadership.late_hosts())
        self.ending.check()

    def _close(self) -> None:
        """End everything this agent owns, within bounds."""
        if self._has_servers:
            self.peers.close()
        if self.is_member:
            self.checkpoints.close(is_late=self.ending.is_flushing)  # it has had its time then
        self.leadership.close()
        self.workforce.stop_all(STOP_WORKERS_S)
        if self._has_servers:
            self.servers.close()
        self.writer.close()
        if self.watch is not None:
            self.watch.close()
        if self.lease is not None:
            self.lease.close()
            try:
                if self.ending.is_of_job():
                    self.registry.erase_if_last(self.token)
            except StoreUnavailable as error:
                logger.info("the job's keys are left to the next start: %s", error)
        self.memory.close()
        self.store_client.close()
        self.log.close()

    # ---- registry ------------------------------------------------------------------------------------

    def _on_registry(self, event: RegistryEvent) -> None:
        if self.ending.is_flushing and isinstance(event, MemberGone | FaultPut):
            return  # hosts that end for the same signal are no losses; a recovery that is under way goes on
        match event:
            case MemberPut(member=member):
                self._members[member.id] = member
                self.peers.set_members(self._members)
                self.leadership.act(lambda leader: leader.joined(member))
            case MemberGone(member_id=member_id):
                if member_id == self.id and self.lease is not None:
                    self.lease.enrol_again()  # or hear why not
                else:
                    self._members.pop(member_id, None)
                    self.peers.set_members(self._members)
                self.leadership.on_member_gone(member_id)
            case LeaderPut(member_id=member_id, term=term):
                self.leadership.on_leader(member_id, term)
                self.peers.repeat_observations()
            case LeaderGone():
                self.leadership.on_vacant()
            case ViewPut(view=view, revision=revision):
                if revision > self._view_revision:
                    self._view_revision = revision
                    self._on_view(view)
            case ViewGone():
                if self.ending.view is None:
                    self._on_replaced("the job's records were erased")
            case AckPut(ack=ack):
                self.leadership.act(lambda leader: leader.acked(ack))
            case FaultPut(fault=fault):
                self.leadership.act(lambda leader: leader.fault(fault))
            case FinishedPut(member_id=member_id, generation=generation):
                self.leadership.act(lambda leader: leader.finished(member_id, generation))
            case QuarantineGone(host=host):
                self.leadership.act(lambda leader: leader.readmitted(host))
            case StoreReached():
                if self._reached:
                    self.log.emit("store.reachable", seconds=0.0)
                    self.leadership.act(lambda leader: leader.store_returned())
                self._reached = True
            case StoreLost(problem=problem):
                self.log.emit("store.unreachable", reason=problem)

    def _on_view(self, view: View) -> None:
        if view.phase is Phase.ABORTING:
            for rank in self.stalls.frozen():
                self.workforce.kill_rank(rank, "its process is stopped")  # it cannot close anything
        self.host.on_view(view)
        self.leadership.on_view(view)
        if view.phase is Phase.RUNNING:
            self.stalls.start(self.host.ranks())
        else:
            self.stalls.stop()

    def _lead_protection(self) -> None:
        """The leader, also a spare, names steps. From the tick after RUNNING was seen: so have others."""
        view, leader = self.host.view, self.leadership.leader
        if leader is None or view is None or view.phase is not Phase.RUNNING:
            return
        if not self.protection.is_leading(view.generation, leader.term):
            self.protection.lead(view, first_name(view), leader.term)

    # ---- protection ----------------------------------------------------------------------------------

    def _data_address(self, member: MemberId) -> tuple[str, int] | None:
        found = self._members.get(member)
        return None if found is None else (found.address, found.data_port)

    def _generation(self) -> int:
        return self.host.view.generation if self.is_member and self.host.view is not None else 0

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            member=self.id,
            generation=self._generation(),
            view_revision=self._view_revision,
            reaches_store=self.lease is not None and self.lease.reaches_store,
        )

    # ---- fencing and the end -------------------------------------------------------------------------

    def _check_lease(self) -> None:
        """Past its own deadline: fence, unless etcd is down for all (peers say so) or has just returned."""
        peers, now_s = self.peers.who_reaches_store(), time.monotonic()
        if self.lease is not None and (why := self.cut_off.judge(self.lease.is_overdue, peers, now_s)):
            self._on_replaced(why)

    def _on_replaced(self, why: str) -> None:
        if self.ending.view is None:
            self.log.emit("member.fenced", generation=self._generation(), reason=why)
            self.workforce.exit_all(ExitCode.REPLACED, "its host was replaced")
            raise Replaced(why, is_awaited="" in self.host.named())

    def _on_parked(self, worker: Worker) -> None:
        self.log.emit("worker.ready", pid=worker.handle.pid, seconds=self.workforce.ready_s)
        if self.is_member:
            self.host.on_parked(worker)

    def _on_lost(self, worker: Worker, cause: str) -> None:
        if self.is_member:
            self.host.on_lost(worker, cause)
        elif worker.state is WorkerState.GONE:
            raise DeadPoolError(f"a worker of {self.host_label} {cause} before it was ready; see its output")

    def _summarise(self) -> None:
        protected = self.protection.protected
        self.log.emit(
            "agent.summary",
            generation=self._generation(),
            bytes_sent=self.servers.bytes_sent,
            host_memory_bytes=self.memory.memory_bytes(),
            protected_step=protected.step if protected else None,
        )

    def _say(self, line: str) -> None:
        print(f"[{self.host_label}] {line}", file=sys.stderr, flush=True)
