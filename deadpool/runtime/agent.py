"""The agent: one process per host. It owns the host's copies, workers and lease, and may lead the job.

One main thread carries out everything; watches, connections, streams and children have threads of their
own that only hand over (`_post`). Agent death is host loss: the workers die with it.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from deadpool.communicator.rendezvous_server import RendezvousServer
from deadpool.config import Config
from deadpool.core.types import Member, MemberId, Name, Phase, View
from deadpool.errors import DeadPoolError, ExitCode, StoreUnavailable
from deadpool.events import EventLog
from deadpool.membership.claim import claim_job
from deadpool.membership.etcd import EtcdConfig, EtcdStore, parse_endpoints
from deadpool.membership.lease import LeaseKeeper
from deadpool.membership.records import (
    AckPut,
    FaultPut,
    FinishedPut,
    JobClaim,
    LeaderGone,
    LeaderPut,
    MemberGone,
    MemberPut,
    RegistryEvent,
    StoreLost,
    StoreReached,
    ViewGone,
    ViewPut,
)
from deadpool.membership.registry import Registry
from deadpool.membership.store import Lease, Watch
from deadpool.runtime.checkpointing import CheckpointCallbacks, CheckpointTier, checkpoint_root
from deadpool.runtime.fetch import Fetcher
from deadpool.runtime.host import Host, HostCallbacks, HostParts, first_name
from deadpool.runtime.leadership import Leadership
from deadpool.runtime.messages import (
    Control,
    Heartbeat,
    Relay,
    ShardWritten,
    Stalled,
    StallQuery,
)
from deadpool.runtime.peers import Peers, PeersCallbacks
from deadpool.runtime.protection import Protection, ProtectionCallbacks
from deadpool.runtime.push import HolderPusher
from deadpool.runtime.result import note_agent, write_result
from deadpool.runtime.stalls import Stalls, ranks_of
from deadpool.runtime.status import describe
from deadpool.runtime.workforce import Worker, WorkerState, Workforce, WorkforceCallbacks
from deadpool.runtime.writer import RegistryWriter
from deadpool.store.checkpoint import Shard
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.replication import Replicator
from deadpool.store.tcp import TcpTransport

logger = logging.getLogger(__name__)

TICK_S = 0.1
LEAD_RETRY_S = 0.5
STOP_WORKERS_S = 5.0
FLUSH_LIMIT_S = 10.0  # SIGTERM: Slurm and Kubernetes kill 30 s after it
PROGRESS_CHECK_S = 0.25
LONG_WAIT_S = 30.0
START_TIMEOUT_S = 300.0  # imports of the workers on a slow file system


class _End(Exception):
    """Unwinds the main loop: this agent is done."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Replaced(Exception):
    """This incarnation was replaced; its host may come back as a new one."""


class Agent:
    """One incarnation of one host.

    Args:
        config: configuration of the job.
        run_dir: folder of the run.
        host: label of this host, part of every member id.
        run_id: equal for all agents of one launch; "" if agents are started one by one.
        token: the launch's token; the job's own may be another (the first agent's).
    """

    def __init__(self, config: Config, run_dir: Path, host: str, run_id: str, token: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.host_label = host
        self.id: MemberId = f"{host}-{secrets.token_hex(3)}"
        self._run_id = run_id
        self._token = token
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self.log = EventLog(
            run_dir / f"events-{self.id}.jsonl", run_id or config.job.job_id, self.id, console=self._say
        )
        self.address = config.run.address or _own_address(config.membership.etcd)
        self._members: dict[MemberId, Member] = {}
        self._reached = False
        self._ending: View | None = None
        self._worker_codes: dict[int, int] = {}
        self._signal = 0
        self._terminate_by_s = 0.0  # SIGTERM was heard: the snapshot is flushed until then
        self._has_servers = False
        self._checkpointed_step = 0
        self._view_revision = 0
        self.degraded: dict[str, float] = {}  # reason -> since when

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
        self._build()
        try:
            self._start()
            self._loop()
        except _End as end:
            return end.code
        finally:
            self._close()
        raise AssertionError("the loop ends by an exception")

    def _build(self) -> None:
        config = self.config
        self.store_client = EtcdStore(_etcd_config(config))
        self.registry = Registry(self.store_client, config.job.job_id)
        self.writer = RegistryWriter()
        self.memory = HostMemoryStore(self.id)
        self.leadership = Leadership(
            self.id,
            self.registry,
            self.writer,
            config,
            self.log,
            query_stall=self._query_stall,
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
                ended=self._on_worker_ended,
            ),
        )
        self.stalls = Stalls(self.id, config.liveness, self.workforce, self.log)
        self.lease: LeaseKeeper | None = None
        self.watch: Watch | None = None

    def _start(self) -> None:
        config = self.config
        self.store_client.connect()
        claim = claim_job(
            self.registry,
            JobClaim(
                run_id=self._run_id,
                token=self._token,
                n_members=config.job.nnodes + config.job.spares,
                claimed_by=f"{socket.gethostname()}:{os.getpid()}",
            ),
            config.membership.lease_ttl_s,
        )
        self._token = claim.token
        self.workforce.start(config.job.nproc_per_node)
        self._start_servers()
        self._wait_until_parked()
        self.member = self._describe()
        self._make_parts()
        self.lease = LeaseKeeper(
            self.store_client,
            config.membership.lease_ttl_s,
            enrol=self._enrol,
            on_lost=lambda error: self.post(self._on_replaced, str(error)),
        )
        self.lease.start()
        self.log.emit("member.registered", host=self.host_label, granted_ttl_s=self.lease.granted_ttl_s)
        self.watch = self.registry.watch(lambda event: self.post(self._on_registry, event))
        note_agent(self.run_dir, self.id, self.address, self._control_port)
        self.peers.start_watching()

    def _start_servers(self) -> None:
        self.rendezvous = RendezvousServer(self.address, self._token)
        self._rendezvous_port = self.rendezvous.start()
        self.transport = TcpTransport(self._token, bind_host=self.address)
        self.server = DataServer(self.memory, self.transport)
        _, self._data_port = self.server.start()
        self.replicator = Replicator(
            self.memory,
            self.transport,
            address_of=self._data_address,
            on_held=lambda rank, name: self.post(self._pusher.acked, rank, name),
            on_failed=lambda rank, name, why: self.post(self._on_push_failed, rank, name, why),
        )
        self.replicator.start()
        self.peers = Peers(
            self.id,
            self.address,
            self._token,
            self.config,
            self.log,
            PeersCallbacks(
                post=self.post,
                heartbeat=self._heartbeat,
                message=self._on_control,
                silent=self.leadership.on_silent,
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
                written=self._on_shard_written,
                completed=lambda name: self.leadership.act(lambda leader: leader.checkpoint_found(name)),
                may_write=lambda: self.lease is not None and not self.lease.is_overdue,
            ),
        )
        self._pusher = HolderPusher(
            self.replicator, held=lambda rank, name: self.post(self.protection.holder_acked, rank, name)
        )
        self.protection = Protection(
            self.id,
            self.memory,
            self._pusher,
            ProtectionCallbacks(
                send=self._send_relay,
                leader=lambda: self.leadership.leader_id,
                tell_worker=self._tell_worker,
                finished_step=self._finished_step,
                committed=self._on_committed,
                refused=lambda rank, step, why: self.log.emit(
                    "snapshot.refused", generation=self._generation(), rank=rank, step=step, reason=why
                ),
                held=lambda rank, name: self.host.on_held(rank, name),
            ),
        )
        self.fetcher = Fetcher(self.transport, self.memory, lambda: dict(self._members), self.post)
        self.host = Host(
            self.member,
            self._token,
            HostParts(
                config=self.config,
                run_dir=self.run_dir,
                registry=self.registry,
                writer=self.writer,
                store=self.memory,
                server=self.server,
                workforce=self.workforce,
                protection=self.protection,
                fetcher=self.fetcher,
                checkpoints=self.checkpoints,
                log=self.log,
                stop_streams=self.replicator.set_generation,
            ),
            HostCallbacks(
                members=lambda: self._members,
                replaced=self._on_replaced,
                ended=self._on_ended,
                broken=self._on_broken,
                rendezvous_generation=self.rendezvous.set_generation,
            ),
        )

    def _describe(self) -> Member:
        return Member(
            id=self.id,
            host=self.host_label,
            address=self.address,
            control_port=self._control_port,
            data_port=self._data_port,
            rendezvous_port=self._rendezvous_port,
            nproc=self.config.job.nproc_per_node,
            node_rank=self.config.run.node_rank,
            domain=self.config.run.domain,
            versions=tuple(sorted(self.workforce.versions.items())),
            pid=os.getpid(),
        )

    def _enrol(self, lease: Lease, again: bool) -> None:
        if again:
            self.registry.register_again(self.member, lease, holds_slot=self.host.slot is not None)
        else:
            self.registry.register(self.member, lease)

    def _wait_until_parked(self) -> None:
        """Imports and self-test of the workers; only then is this host worth registering."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(worker.state is WorkerState.STARTING for worker in self.workforce.workers):
            if time.monotonic() > deadline:
                raise DeadPoolError(
                    f"the workers of {self.host_label} did not start within {START_TIMEOUT_S:g} s"
                )
            self._take(TICK_S)
        if any(worker.state is not WorkerState.PARKED for worker in self.workforce.workers):
            raise DeadPoolError(
                f"a worker of {self.host_label} did not pass its self-test; see its output above"
            )

    def _loop(self) -> None:
        next_tick = 0.0
        while True:
            self._take(TICK_S)
            now_s = time.monotonic()
            if now_s >= next_tick:
                next_tick = now_s + TICK_S
                self._tick(now_s)

    def _take(self, timeout_s: float) -> None:
        try:
            function, arguments = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return
        function(*arguments)

    def _tick(self, now_s: float) -> None:
        if self._signal:
            self._end_by_signal()
        self.workforce.tick()
        self.host.tick()
        self.protection.tick()
        self._check_lease()
        if self._ending is None and self.stalls.check(self.host.view):
            self._send_stalled()
        lease = self.lease if self._reached and self._ending is None else None
        if lease is not None and self.leadership.tick(lease.lease):
            self._lead_protection()
        self._check_all_ended()

    def _close(self) -> None:
        """End everything this agent owns, within bounds."""
        if self._has_servers:
            self.peers.close()
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()
        self.workforce.stop_all(STOP_WORKERS_S)
        if self._has_servers:
            self.replicator.close()
            self.transport.close()
            self.rendezvous.close()
        self.writer.close()
        if self.watch is not None:
            self.watch.close()
        if self.lease is not None:
            self.lease.close()
            try:
                self.registry.erase_if_last()
            except StoreUnavailable as error:
                logger.info("the job's keys are left to the next start: %s", error)
        self.memory.close()
        self.store_client.close()
        self.log.close()

    # ---- registry ------------------------------------------------------------------------------------

    def _on_registry(self, event: RegistryEvent) -> None:
        if self._terminate_by_s:
            return  # hosts that end for the same signal are no losses
        match event:
            case MemberPut(member=member):
                self._members[member.id] = member
                self._members_changed()
                self.leadership.act(lambda leader: leader.joined(member))
            case MemberGone(member_id=member_id):
                if member_id != self.id:
                    self._members.pop(member_id, None)
                    self._members_changed()
                self.leadership.act(lambda leader: leader.lease_expired(member_id))
            case LeaderPut(member_id=member_id, term=term):
                self.leadership.on_leader(member_id, term)
            case LeaderGone():
                self.leadership.on_vacant()
            case ViewPut(view=view, revision=revision):
                if revision > self._view_revision:
                    self._view_revision = revision
                    self._on_view(view)
            case ViewGone():
                if self._ending is None:
                    self._on_replaced("the job's records were erased")
            case AckPut(ack=ack):
                self.leadership.act(lambda leader: leader.acked(ack))
            case FaultPut(fault=fault):
                self.leadership.act(lambda leader: leader.fault(fault))
            case FinishedPut(member_id=member_id, generation=generation):
                self.leadership.act(lambda leader: leader.finished(member_id, generation))
            case StoreReached():
                if self._reached:
                    self.log.emit("store.reachable", seconds=0.0)
                    self.leadership.act(lambda leader: leader.store_returned())
                self._reached = True
            case StoreLost(problem=problem):
                self.log.emit("store.unreachable", reason=problem)
            case _:
                pass

    def _members_changed(self) -> None:
        self.peers.set_members(self._members)

    def _on_view(self, view: View) -> None:
        if view.phase is Phase.ABORTING:
            for rank in self.stalls.frozen():
                self.workforce.kill_rank(rank, "its process is stopped")  # it cannot close anything
        self.host.on_view(view)
        if view.phase is Phase.RUNNING:
            self.stalls.start(self.host.ranks())
            self._lead_protection()
        else:
            self.stalls.stop()

    def _lead_protection(self) -> None:
        """The leader names steps, also if it is a spare."""
        view, leader = self.host.view, self.leadership.leader
        if leader is None or view is None or view.phase is not Phase.RUNNING:
            return
        if not self.protection.is_leading(view.generation, leader.term):
            self.protection.lead(view, first_name(view), leader.term)

    # ---- protection ----------------------------------------------------------------------------------

    def _on_shard_written(self, name: Name, shard: Shard) -> None:
        """A shard of this host is durable: the leader waits for it."""
        message = ShardWritten(generation=self._generation(), name=name, shard=shard)
        if self.leadership.leader is not None:
            self._on_shard(message)
        elif self.leadership.leader_id:
            self.peers.send(self.leadership.leader_id, message)

    def _on_shard(self, message: ShardWritten) -> None:
        if self.leadership.leader is not None:
            self.checkpoints.shard_written(message.name, message.shard)

    def _on_committed(self, name: Name) -> None:
        every = self.config.checkpoint.every
        if every and name.step // every > self._checkpointed_step // every:
            self._checkpointed_step = name.step
            self.checkpoints.save(self.host.ranks(), name)
        self.log.emit("snapshot.committed", generation=self._generation(), step=name.step)
        if self.degraded:
            self.degraded.clear()
            self.log.emit("snapshot.protected", generation=self._generation(), step=name.step)

    def _on_push_failed(self, rank: int, name: Name, why: str) -> None:
        self.log.emit(
            "snapshot.degraded", generation=self._generation(), rank=rank, step=name.step, reason=why
        )
        self.degraded[why] = time.monotonic()
        self.protection.replication_failed(rank, name, why)

    def _send_relay(self, member: MemberId, relay: Relay) -> None:
        if member == self.id:
            self.post(self.protection.relayed, relay)
        else:
            self.peers.send(member, relay)

    def _tell_worker(self, rank: int, message: Any) -> None:
        worker = self.workforce.by_rank(rank)
        if worker is not None:
            worker.handle.send(message)

    def _finished_step(self, rank: int) -> int:
        worker = self.workforce.by_rank(rank)
        return worker.handle.page.sample().finished_step if worker is not None else 0

    def _data_address(self, member: MemberId) -> tuple[str, int] | None:
        found = self._members.get(member)
        return None if found is None else (found.address, found.data_port)

    # ---- peers ---------------------------------------------------------------------------------------

    def _generation(self) -> int:
        host = getattr(self, "host", None)
        return host.view.generation if host is not None and host.view is not None else 0

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            member=self.id,
            generation=self._generation(),
            view_revision=self._view_revision,
            reaches_store=self.lease is not None and self.lease.reaches_store,
        )

    def _on_control(self, sender: MemberId, message: Control) -> None:
        match message:
            case Relay(generation=generation):
                if generation == self._generation():
                    self.protection.relayed(message)
            case Stalled():
                self._on_stalled(message)
            case ShardWritten():
                self._on_shard(message)
            case StallQuery(generation=generation):
                if generation == self._generation():
                    self._send_stalled()
            case _:
                pass

    # ---- progress ------------------------------------------------------------------------------------

    def _query_stall(self, generation: int) -> None:
        self.peers.broadcast(StallQuery(generation=generation))
        self._send_stalled()

    def _send_stalled(self) -> None:
        message = self.stalls.report(self._generation())
        if self.leadership.leader is not None:
            self.post(self._on_stalled, message)
        elif self.leadership.leader_id:
            self.peers.send(self.leadership.leader_id, message)

    def _on_stalled(self, message: Stalled) -> None:
        self.leadership.act(lambda leader: leader.stalled(message.generation, ranks_of(message)))

    # ---- fencing and the end -------------------------------------------------------------------------

    def _check_lease(self) -> None:
        """Past its own deadline: fence, unless etcd is down for all (peers say so)."""
        if self.lease is None or not self.lease.is_overdue or len(self._members) < 2:
            return
        heard, reaches = self.peers.who_reaches_store()
        if reaches:
            self._on_replaced("its lease ran out while peers reach the control plane")
        elif not heard:
            self._on_replaced("its lease ran out and it reaches neither the control plane nor a peer")

    def _on_replaced(self, why: str) -> None:
        if self._ending is None:
            self.log.emit("member.fenced", generation=self._generation(), reason=why)
            raise Replaced(why)

    def _on_parked(self, worker: Worker) -> None:
        self.log.emit("worker.ready", pid=worker.handle.pid, seconds=self.workforce.ready_s)
        if hasattr(self, "host"):
            self.host.on_parked(worker)

    def _on_lost(self, worker: Worker, cause: str) -> None:
        if hasattr(self, "host"):
            self.host.on_lost(worker, cause)
        elif worker.state is WorkerState.GONE:
            raise DeadPoolError(
                f"a worker of {self.host_label} {cause} before it was ready; see its output above"
            )

    def _on_broken(self, why: str) -> None:
        raise _End(int(ExitCode.USER_ERROR), why)

    def _on_ended(self, view: View) -> None:
        if self._ending is not None:
            return
        self._ending = view
        self.peers.stop_judging()
        pids = [self._members[member].pid for member in view.slots if member in self._members]
        write_result(self.run_dir, view, pids)
        if view.phase is Phase.FINISHED:
            self.workforce.finish(view.generation)
        else:
            self.workforce.exit_all(view.exit_code or int(ExitCode.USER_ERROR), view.reason)

    def _on_worker_ended(self, worker: Worker, code: int) -> None:
        self._worker_codes[worker.rank] = code

    def _check_all_ended(self) -> None:
        view = self._ending
        if view is None:
            return
        if view.phase is Phase.FINISHED and any(
            worker.state is not WorkerState.GONE for worker in self.workforce.workers
        ):
            return  # scripts may go on after wrap
        bad = [code for code in self._worker_codes.values() if code]
        code = view.exit_code or (int(ExitCode.USER_ERROR) if bad else 0)
        self._summarise()
        self.log.emit("run.finished", generation=view.generation, exit_code=code, reason=view.reason)
        raise _End(code, view.reason)

    def _summarise(self) -> None:
        sent = self.replicator.metrics.as_dict().get("bytes_sent", 0)
        protected = self.protection.protected
        self.log.emit(
            "agent.summary",
            generation=self._generation(),
            bytes_sent=sent,
            host_memory_bytes=self.memory.memory_bytes(),
            protected_step=protected.step if protected else None,
        )

    def on_signal(self, number: int) -> None:
        """Signal handler's part: noticed at the next tick."""
        self._signal = number

    def _end_by_signal(self) -> None:
        """Ctrl-C ends at once; SIGTERM (pre-emption) first makes the last protected step durable."""
        if self._signal == signal.SIGINT:
            raise _End(int(ExitCode.INTERRUPTED), "Ctrl-C")
        protected = self.protection.protected
        now_s = time.monotonic()
        if protected is None or self.host.slot is None:
            raise _End(int(ExitCode.TERMINATED), "SIGTERM")
        if not self._terminate_by_s:
            self._terminate_by_s = now_s + FLUSH_LIMIT_S
            self.peers.stop_judging()
            self.checkpoints.save(self.host.ranks(), protected)
        if self.checkpoints.is_durable(protected) or now_s > self._terminate_by_s:
            raise _End(int(ExitCode.TERMINATED), "SIGTERM")

    def _say(self, line: str) -> None:
        print(f"[{self.host_label}] {line}", file=sys.stderr, flush=True)


def _etcd_config(config: Config) -> EtcdConfig:
    m = config.membership
    return EtcdConfig(
        endpoints=parse_endpoints(",".join(m.etcd)),
        ca_file=Path(m.ca) if m.ca else None,
        cert_file=Path(m.cert) if m.cert else None,
        key_file=Path(m.key) if m.key else None,
        user=m.user or None,
        password=m.password or None,
    )


def _own_address(endpoints: tuple[str, ...]) -> str:
    """The address that this host uses towards etcd: peers reach it there too."""
    host, _, port = (endpoints[0] if endpoints else "127.0.0.1:2379").rpartition(":")
    host = host.removeprefix("http://").removeprefix("https://")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host or "127.0.0.1", int(port)))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
