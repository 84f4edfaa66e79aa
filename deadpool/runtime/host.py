"""Carries out Views on one host: what its workers and its copies must do in each phase.

Everything runs on the agent's main thread. The order within a generation is DESIGN section 7; what is
waited for is kept in `_Generation`, and thrown away whole when a newer one begins.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deadpool.config import Config
from deadpool.core.plan import NoLiveCopy, RankPlan, merge_groups, plan_recovery
from deadpool.core.types import (
    Ack,
    Fault,
    FaultKind,
    Member,
    MemberId,
    Name,
    Phase,
    RankCopies,
    ReplicatedGroup,
    Source,
    View,
)
from deadpool.errors import SnapshotError, StoreUnavailable
from deadpool.events import EventLog
from deadpool.membership.registry import Registry
from deadpool.runtime.checkpointing import CheckpointTier
from deadpool.runtime.fetch import Fetcher, SnapshotJob
from deadpool.runtime.messages import (
    Assign,
    Attach,
    Captured,
    FirstStep,
    Note,
    Raised,
    Refused,
    Rehearsed,
    Restore,
    Restored,
    RestoreFailed,
    SegmentReply,
    Unwound,
    WorkerDone,
    WorkerToAgent,
)
from deadpool.runtime.once import OnceArea
from deadpool.runtime.protection import Protection
from deadpool.runtime.result import note_worker
from deadpool.runtime.workforce import Worker, WorkerState, Workforce
from deadpool.runtime.writer import RegistryWriter
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.segment import BankState, SegmentLayout

USER_ERROR_DELAY_S = 1.0
"""An error that looks like the user's is reported after this: the death of a peer, which raises too, is
known by then (measured: a killed process is noticed within 0.1 s)."""

RESPAWNS_OF_PARKED = 2  # a spare whose worker does not come up so often is broken
ONCE_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCallbacks:
    """What the host asks of its agent."""

    members: Callable[[], dict[MemberId, Member]]
    replaced: Callable[[str], None]  # this member was replaced: become a new incarnation
    ended: Callable[[View], None]  # FINISHED or HALTED
    broken: Callable[[str], None]  # this host cannot run workers
    rendezvous_generation: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """The parts that a host drives."""

    config: Config
    run_dir: Path
    registry: Registry
    writer: RegistryWriter
    store: HostMemoryStore
    server: DataServer
    workforce: Workforce
    protection: Protection
    fetcher: Fetcher
    checkpoints: CheckpointTier
    log: EventLog
    stop_streams: Callable[[int], None]  # every push of an older generation ends


@dataclass(slots=True)
class _Generation:
    """What belongs to one generation on this host."""

    number: int
    began_s: float = field(default_factory=time.monotonic)
    abort_acked: bool = False
    restore_acked: bool = False
    formed: set[int] = field(default_factory=set)  # ranks whose snapshot 0 is in their own bank
    held: set[int] = field(default_factory=set)  # ranks whose snapshot 0 is on its holder
    is_protected: bool = False
    is_planned: bool = False
    plans: dict[int, RankPlan] = field(default_factory=dict)
    groups: tuple[ReplicatedGroup, ...] = ()
    banks: dict[int, int] = field(default_factory=dict)  # rank -> bank that holds the rollback
    fetching: set[int] = field(default_factory=set)
    fetch_s: float = 0.0
    faults: set[int] = field(default_factory=set)  # ranks already reported lost
    raised: dict[int, tuple[float, Raised]] = field(default_factory=dict)  # rank -> when to report it
    retry_at_s: float = 0.0  # read the acks again
    done: bool = False


class Host:
    """The slot of one member, if it has one.

    Args:
        member: this incarnation.
        token: the job's token, for workers.
        parts: what it drives.
        callbacks: what it asks of the agent.
    """

    def __init__(self, member: Member, token: str, parts: HostParts, callbacks: HostCallbacks) -> None:
        self.view: View | None = None
        self.slot: int | None = None
        self._member = member
        self._token = token
        self._parts = parts
        self._callbacks = callbacks
        self._generation = _Generation(0)
        self._once: dict[int, bytes] = {}  # rank -> its write-once area
        self._once_asked: dict[int, float] = {}  # rank -> when it may be asked for again
        self._parked_losses = 0
        self._user_errors: set[int] = set()  # ranks whose error was reported in this generation

    # ---- views ---------------------------------------------------------------------------------------

    def on_view(self, view: View) -> None:
        """Obey a View; older ones change nothing."""
        if view.generation < self._generation.number:
            return
        self.view = view
        if view.generation > self._generation.number:
            self._begin_generation(view)
        me = self._member.id
        is_over = view.phase in (Phase.FINISHED, Phase.HALTED)
        if self.slot is not None and me not in (*view.slots, *view.leaving) and not is_over:
            self._callbacks.replaced(view.reason)
            return
        self._parts.log.emit(
            "view.adopted", generation=view.generation, phase=view.phase.value, reason=view.reason
        )
        match view.phase:
            case Phase.FORMING:
                self._form(view)
            case Phase.ABORTING:
                self._abort(view)
            case Phase.STALLED:
                self._stall(view)
            case Phase.RESTORING:
                self._restore(view)
            case Phase.RUNNING:
                self._run(view)
            case Phase.FINISHED | Phase.HALTED:
                self._callbacks.ended(view)

    def ranks(self) -> range:
        """Ranks of this host's slot."""
        if self.view is None or self.slot is None:
            return range(0)
        return self.view.ranks_of_slot(self.slot)

    def tick(self) -> None:
        now_s = time.monotonic()
        generation = self._generation
        for rank, (due_s, raised) in list(generation.raised.items()):
            if now_s >= due_s and self.view is not None and self.view.phase is not Phase.ABORTING:
                del generation.raised[rank]
                self._report_raised(rank, raised, FaultKind.USER_ERROR)
        if generation.retry_at_s and now_s >= generation.retry_at_s and self.view is not None:
            generation.retry_at_s = 0.0
            if self.view.phase is Phase.RESTORING:
                self._restore(self.view)
        for worker in self._parts.workforce.workers:
            if worker.state is WorkerState.PARKED:
                self._place(worker)

    def _begin_generation(self, view: View) -> None:
        parts = self._parts
        self._generation = _Generation(view.generation)
        parts.writer.set_generation(view.generation)
        parts.protection.stop()
        parts.stop_streams(view.generation)
        self._callbacks.rendezvous_generation(view.generation)

    def _form(self, view: View) -> None:
        me = self._member.id
        self._parts.server.set_generation(view.generation, first_name(view))
        if me not in view.slots:
            return
        self.slot = view.slots.index(me)
        self._once.clear()
        self._parts.store.empty_all()
        self._parts.workforce.restart_all()
        self._place_all()

    def _abort(self, view: View) -> None:
        me = self._member.id
        workforce = self._parts.workforce
        if me in view.slots:
            slot = view.slots.index(me)
            if self.slot is not None and slot != self.slot:
                self._callbacks.replaced("its slot moved")
                return
            self.slot = slot
        elif me not in view.leaving:
            return  # a spare
        self._user_errors.clear()
        workforce.abort(view.generation, view.reason)
        self._check_quiet()
        self._place_all()

    def _stall(self, view: View) -> None:
        if self.slot is None:
            return
        if view.rollback is None:
            self._parts.workforce.restart_all()
        else:
            self._parts.checkpoints.save(self.ranks(), view.rollback)  # while there is time

    def _restore(self, view: View) -> None:
        me = self._member.id
        if me not in view.slots or view.rollback is None:
            return
        self.slot = view.slots.index(me)
        generation = self._generation
        if not generation.is_planned:
            self._parts.store.empty_newer_than(view.rollback)
            self._parts.server.set_generation(view.generation, view.rollback)
            try:
                self._plan(view)
            except (StoreUnavailable, NoLiveCopy) as error:
                self._parts.log.emit("store.unreachable", generation=view.generation, reason=str(error))
                generation.retry_at_s = time.monotonic() + ONCE_RETRY_S
                return
        self._place_all()
        for rank in self.ranks():
            self._prepare(rank)

    def _plan(self, view: View) -> None:
        acks = [ack for ack in self._parts.registry.acks(view.generation) if ack.phase is Phase.ABORTING]
        inventories = [ack.inventory for ack in acks if ack.inventory is not None]
        self._generation.groups = merge_groups(acks)
        for plan in plan_recovery(view, inventories, self._generation.groups):
            self._generation.plans[plan.rank] = plan
        self._generation.is_planned = True

    def _run(self, view: View) -> None:
        if self._member.id not in view.slots:
            self._place_all()  # a spare builds once while the others train
            return
        self.slot = view.slots.index(self._member.id)
        self._parts.workforce.run(view.generation)
        self._parts.protection.start(view, first_name(view))

    # ---- placing workers -----------------------------------------------------------------------------

    def on_parked(self, worker: Worker) -> None:
        """A worker is ready for an assignment."""
        self._place(worker)

    def _place_all(self) -> None:
        for worker in self._parts.workforce.workers:
            if worker.state is WorkerState.PARKED:
                self._place(worker)

    def _place(self, worker: Worker) -> None:
        view = self.view
        if view is None or worker.state is not WorkerState.PARKED:
            return
        if self._member.id in view.slots:
            slot = view.slots.index(self._member.id)
            rank = slot * view.nproc + worker.handle.local_rank
            if view.phase is Phase.FORMING:
                self._assign(worker, rank, b"")
            elif view.phase in (Phase.ABORTING, Phase.RESTORING):
                self._place_replacement(worker, rank)
        elif view.phase is Phase.RUNNING and not worker.is_rehearsed and self._parts.config.run.rehearse:
            self._rehearse(worker)

    def _place_replacement(self, worker: Worker, rank: int) -> None:
        """A promoted spare, or a fresh worker in the place of a lost one, builds as `rank`."""
        once = self._once_of(rank)
        if once is None:
            self._ask_once(rank)
            return
        self._make_segment(rank, once)
        self._assign(worker, rank, once)
        self._prepare(rank)

    def _rehearse(self, worker: Worker) -> None:
        rank = worker.handle.local_rank
        once = self._once.get(rank)
        if once is None:
            self._ask_once(rank)
            return
        worker.is_rehearsed = True
        self._assign(worker, rank, once, rehearse=True)

    def _assign(self, worker: Worker, rank: int, once: bytes, rehearse: bool = False) -> None:
        view = self.view
        assert view is not None
        host = self._callbacks.members().get(view.rendezvous)
        if host is None:
            return  # its registration is not seen yet: tried again at the next tick
        self._parts.workforce.assign(
            worker,
            Assign(
                rank=rank,
                world_size=view.world_size,
                local_rank=worker.handle.local_rank,
                local_world_size=view.nproc,
                generation=view.generation,
                rendezvous=(host.address, host.rendezvous_port),
                token=self._token,
                member=self._member.id,
                record=once,
                rehearse=rehearse,
            ),
        )
        role = "rehearsal" if rehearse else "promoted" if once else "active"
        if not rehearse:
            note_worker(self._parts.run_dir, self._member.id, rank, worker.handle.pid, view.generation, role)
        self._parts.log.emit(
            "worker.assigned", generation=view.generation, rank=rank, pid=worker.handle.pid, role=role
        )

    # ---- write-once areas ----------------------------------------------------------------------------

    def _once_of(self, rank: int) -> bytes | None:
        if rank not in self._once:
            for segment in (self._parts.store.own(rank), self._parts.store.held(rank)):
                if segment is not None and segment.once_is_sealed:
                    self._once[rank] = bytes(segment.once_view()[: segment.once_len])
                    break
        return self._once.get(rank)

    def _ask_once(self, rank: int) -> None:
        view = self.view
        assert view is not None
        if time.monotonic() < self._once_asked.get(rank, 0.0):
            return
        self._once_asked[rank] = time.monotonic() + 60.0
        slot = view.slot_of_rank(rank)
        holders = view.holders[slot] if view.holders else ()
        sources = [view.slots[slot], *view.leaving, *(view.slots[holder] for holder in holders), *view.slots]
        known = [source for source in dict.fromkeys(sources) if source and source != self._member.id]
        self._parts.fetcher.once(rank, known, view.generation, self._on_once)

    def _on_once(self, rank: int, once: bytes | None, why: str) -> None:
        if once is None and self.view is not None and self.view.source is Source.CHECKPOINT:
            once = self._once_from_checkpoint(rank, self.view)
        if once is None:
            self._once_asked[rank] = time.monotonic() + ONCE_RETRY_S
            self._parts.log.emit("wait.long", waiting_for=f"the constructor record of rank {rank} ({why})")
            return
        self._once_asked.pop(rank, None)
        self._once[rank] = once
        self._place_all()

    def _once_from_checkpoint(self, rank: int, view: View) -> bytes | None:
        """Every copy in memory is lost: the shard has the write-once area, too."""
        if view.rollback is None:
            return None
        try:
            return self._parts.checkpoints.read_once(rank, view.rollback)
        except SnapshotError:
            return None  # said by the caller, and tried again

    def _make_segment(self, rank: int, once: bytes) -> None:
        if self._parts.store.own(rank) is not None:
            return
        area = OnceArea.decode(once)
        segment = self._parts.store.create_own(
            rank,
            SegmentLayout(
                once_bytes=len(once),
                blob_capacity=area.blob_capacity,
                unique_bytes=area.unique_bytes,
                replicated_bytes=area.replicated_bytes,
            ),
        )
        segment.write_once(once)

    # ---- abort ---------------------------------------------------------------------------------------

    def _check_quiet(self) -> None:
        """Ack ABORTING once no worker of this host has anything under way."""
        view, generation = self.view, self._generation
        if view is None or view.phase is not Phase.ABORTING or generation.abort_acked or self.slot is None:
            return
        workforce = self._parts.workforce
        if any(worker.state is WorkerState.ABORTING for worker in workforce.workers):
            return
        generation.abort_acked = True
        parts = self._parts
        parts.server.set_generation(view.generation)
        inventory = parts.store.inventory()
        lost = tuple(
            rank
            for rank in self.ranks()
            if (worker := workforce.by_rank(rank)) is None or worker.state is WorkerState.BUILDING
        )
        last_step = max((worker.finished_step for worker in workforce.workers), default=0)
        ack = Ack(
            member=self._member.id,
            generation=view.generation,
            phase=Phase.ABORTING,
            inventory=inventory,
            lost_ranks=() if self._member.id in view.joining else lost,
            last_step=last_step,
            seconds=(("abort", time.monotonic() - generation.began_s),),
            groups=self._groups(inventory.copies),
        )
        parts.log.emit(
            "recovery.phase",
            generation=view.generation,
            phase="abort",
            seconds=time.monotonic() - generation.began_s,
        )
        parts.writer.put(view.generation, "ack of ABORTING", lambda: parts.registry.put_ack(ack))

    def _groups(self, copies: tuple[RankCopies, ...]) -> tuple[ReplicatedGroup, ...]:
        groups: set[ReplicatedGroup] = set()
        for each in copies:
            once = self._once_of(each.rank)
            if once is not None:
                groups.update(OnceArea.decode(once).groups)
        return tuple(sorted(groups, key=lambda group: group.ranks))

    # ---- restore -------------------------------------------------------------------------------------

    def _prepare(self, rank: int) -> None:
        """Have the rollback step in an own bank of `rank`, then let its worker restore."""
        view, generation = self.view, self._generation
        if view is None or view.phase is not Phase.RESTORING or view.rollback is None:
            return
        segment = self._parts.store.own(rank)
        plan = generation.plans.get(rank)
        if plan is None and view.source is Source.CHECKPOINT:
            plan = RankPlan(rank=rank)
        once = self._once_of(rank)
        if segment is None or plan is None or once is None:
            return  # prepared again once its write-once area is here
        bank = segment.bank_of(view.rollback)
        if bank is not None:
            generation.banks[rank] = bank
            self._try_restore(rank)
        elif rank not in generation.fetching:
            generation.fetching.add(rank)
            free = [bank for bank in (0, 1) if segment.bank_info(bank).state is BankState.EMPTY]
            is_durable = view.source is Source.CHECKPOINT
            self._parts.fetcher.snapshot(
                SnapshotJob(
                    plan=plan,
                    name=view.rollback,
                    load=self._parts.checkpoints.load if is_durable else None,
                    bank=free[0] if free else 0,
                    segment=segment,
                    once=OnceArea.decode(once),
                    groups=generation.groups,
                    generation=view.generation,
                ),
                self._on_fetched,
            )

    def _on_fetched(self, job: SnapshotJob, problem: str, seconds: float) -> None:
        generation = self._generation
        if job.generation != generation.number:
            return
        if problem:
            rank = job.plan.rank
            self._report(FaultKind.SPARE_FAILED, (rank,), f"fetch of rank {rank}: {problem}")
            return
        generation.fetch_s = max(generation.fetch_s, seconds)
        generation.banks[job.plan.rank] = job.bank
        self._try_restore(job.plan.rank)

    def _try_restore(self, rank: int) -> None:
        view, generation = self.view, self._generation
        worker = self._parts.workforce.by_rank(rank)
        if view is None or view.phase is not Phase.RESTORING or view.rollback is None or worker is None:
            return
        host = self._callbacks.members().get(view.rendezvous)
        bank = generation.banks.get(rank)
        if bank is None or host is None or worker.state not in (WorkerState.QUIET, WorkerState.ATTACHED):
            return
        self._parts.workforce.restore(
            worker,
            Restore(
                generation=view.generation,
                name=view.rollback,
                bank=bank,
                rendezvous=(host.address, host.rendezvous_port),
            ),
        )

    def _check_restored(self) -> None:
        view, generation = self.view, self._generation
        if view is None or view.phase is not Phase.RESTORING or generation.restore_acked:
            return
        workforce, parts = self._parts.workforce, self._parts
        if not workforce.all_in(self.ranks(), {WorkerState.RESTORED}):
            return
        generation.restore_acked = True
        seconds: dict[str, float] = {"fetch": generation.fetch_s} if generation.fetch_s else {}
        for worker in workforce.workers:
            for phase, value in worker.seconds.items():
                seconds[phase] = max(seconds.get(phase, 0.0), value)
        for phase, value in seconds.items():
            parts.log.emit("recovery.phase", generation=view.generation, phase=phase, seconds=value)
        ack = Ack(
            member=self._member.id,
            generation=view.generation,
            phase=Phase.RESTORING,
            seconds=tuple(seconds.items()),
        )
        parts.writer.put(view.generation, "ack of RESTORING", lambda: parts.registry.put_ack(ack))

    # ---- what workers say ----------------------------------------------------------------------------

    def on_message(self, worker: Worker, message: WorkerToAgent) -> None:
        match message:
            case Attach():
                self._on_attach(worker, message)
            case Captured():
                self._on_captured(worker, message)
            case Refused():
                self._parts.protection.refused(worker.rank, message)
            case Raised():
                self._on_raised(worker, message)
            case Unwound():
                self._check_quiet()
                if self.view is not None and self.view.phase is Phase.RESTORING:
                    self._try_restore(worker.rank)
            case Restored():
                self._check_restored()
            case RestoreFailed(why=why):
                self._report(FaultKind.COLLECTIVE, (worker.rank,), f"rebuild: {why}")
            case WorkerDone():
                self._check_done()
            case FirstStep():
                self._parts.log.emit(
                    "recovery.phase",
                    generation=message.generation,
                    phase="first_step",
                    rank=worker.rank,
                    seconds=message.seconds,
                )
            case Rehearsed():
                self._parts.log.emit(
                    "worker.rehearsed",
                    seconds=message.seconds,
                    problem=message.problem,
                    pid=worker.handle.pid,
                )
            case Note(event=event, fields=fields):
                self._parts.log.emit(event, generation=self._generation.number, **fields)
            case _:
                pass

    def _on_attach(self, worker: Worker, message: Attach) -> None:
        rank = worker.rank
        once = message.once
        if self.view is not None and self.view.phase is Phase.FORMING:
            self._once[rank] = once
        self._make_segment(rank, once)
        segment = self._parts.store.own(rank)
        assert segment is not None
        view = self.view
        load: Name | None = None
        if view is not None and view.phase is Phase.FORMING and view.rollback is not None:
            load = view.rollback
            try:
                self._parts.checkpoints.load(rank, load, segment, 0, OnceArea.decode(once))
            except SnapshotError as error:
                self._report(FaultKind.BAD_INPUT, (rank,), str(error), 0)
                return
        worker.enter(WorkerState.ATTACHED)
        worker.handle.send(SegmentReply(generation=message.generation, load=load), (segment.fd,))
        self._prepare(rank)

    def _on_captured(self, worker: Worker, message: Captured) -> None:
        view, generation = self.view, self._generation
        if view is None:
            return
        if view.phase is Phase.FORMING:
            if message.name != first_name(view):
                return
            generation.formed.add(worker.rank)
            if generation.formed == set(self.ranks()) and not generation.is_protected:
                generation.is_protected = True
                self._parts.protection.start(view, first_name(view))
        elif message.name.generation == view.generation:
            # Frozen: whatever an older generation captured is not reported any more.
            self._parts.protection.captured(worker.rank, message)

    def on_held(self, rank: int, name: Name) -> None:
        """A rank's copy is on its holder."""
        view, generation, parts = self.view, self._generation, self._parts
        if view is None or view.phase is not Phase.FORMING or name != first_name(view):
            return
        generation.held.add(rank)
        if generation.held != set(self.ranks()) or generation.restore_acked:
            return
        generation.restore_acked = True
        ack = Ack(member=self._member.id, generation=view.generation, phase=Phase.FORMING)
        parts.writer.put(view.generation, "ack of FORMING", lambda: parts.registry.put_ack(ack))

    def _check_done(self) -> None:
        view, parts = self.view, self._parts
        if view is None or view.phase is not Phase.RUNNING or self._generation.done:
            return
        if parts.workforce.all_in(self.ranks(), {WorkerState.DONE}):
            self._generation.done = True
            me = self._member.id
            parts.writer.put(
                view.generation, "finish record", lambda: parts.registry.put_finished(me, view.generation)
            )

    # ---- faults --------------------------------------------------------------------------------------

    def on_lost(self, worker: Worker, cause: str) -> None:
        """A worker is gone. Its copies stay; a fresh one starts in its place."""
        view, generation = self.view, self._generation
        local_rank, rank = worker.handle.local_rank, worker.rank
        self._parts.log.emit("worker.exited", rank=rank, pid=worker.handle.pid, how=cause)
        if worker.handle.is_parked:
            self._parked_losses += 1
            if self._parked_losses > RESPAWNS_OF_PARKED:
                self._callbacks.broken(f"a parked worker {cause}, {self._parked_losses} times")
                return
            self._parts.workforce.replace(local_rank)
            return
        self._parts.workforce.replace(local_rank)
        if view is None:
            return
        if view.phase is Phase.ABORTING and not generation.abort_acked:
            self._check_quiet()  # "rank r lost, copies kept": said in the ack
            return
        raised = generation.raised.pop(rank, None)
        if raised is not None:
            self._report_raised(rank, raised[1], FaultKind.USER_ERROR)
        elif rank not in self._user_errors:
            kind = FaultKind.ABORT_TIMEOUT if worker.killed_for else FaultKind.WORKER_EXIT
            generation.faults.add(rank)
            ranks = tuple(sorted(generation.faults))
            self._report(kind, ranks, f"worker of rank {rank} {cause}", worker.finished_step + 1)

    def _on_raised(self, worker: Worker, message: Raised) -> None:
        view = self.view
        if view is None or view.phase is Phase.ABORTING:
            return  # it belongs to the abort
        if message.generation != view.generation and message.step >= 0:
            return
        if message.bad_input:
            self._report_raised(worker.rank, message, FaultKind.BAD_INPUT)
        elif message.collective:
            self._report_raised(worker.rank, message, FaultKind.COLLECTIVE)
        else:
            due_s = time.monotonic() + (0.0 if message.step < 0 else USER_ERROR_DELAY_S)
            self._generation.raised[worker.rank] = (due_s, message)

    def _report_raised(self, rank: int, message: Raised, kind: FaultKind) -> None:
        if kind is not FaultKind.COLLECTIVE:
            self._user_errors.add(rank)
            print(f"[rank {rank}] {message.traceback}", file=sys.stderr, flush=True)
        detail = message.text if kind is FaultKind.COLLECTIVE else message.traceback
        self._report(kind, (rank,), detail, message.step)

    def _report(self, kind: FaultKind, ranks: tuple[int, ...], detail: str, step: int | None = None) -> None:
        view, parts = self.view, self._parts
        assert view is not None
        fault = Fault(
            kind=kind,
            member=self._member.id,
            generation=view.generation,
            ranks=ranks,
            step=self._last_step() + 1 if step is None else max(0, step),
            detail=detail,
        )
        parts.log.emit(
            "fault.reported",
            generation=view.generation,
            kind=kind.value,
            ranks=list(ranks),
            detail=detail.strip().splitlines()[-1][:300] if detail.strip() else "",
        )
        parts.writer.put(view.generation, f"fault {kind.value}", lambda: parts.registry.put_fault(fault))

    def _last_step(self) -> int:
        return max((worker.finished_now() for worker in self._parts.workforce.workers), default=0)


def first_name(view: View) -> Name:
    """The snapshot that a generation begins from: what it rolled back to, or its own snapshot 0."""
    return view.rollback or Name(step=0, generation=view.generation)
