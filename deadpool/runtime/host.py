"""Carries out Views on one host: what its workers and its copies must do in each phase.

Everything runs on the agent's main thread. The order within a generation is DESIGN section 7; what is
waited for is kept in `_Generation`, and thrown away whole when a newer one begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from deadpool.core.types import (
    Ack,
    FaultKind,
    Member,
    MemberId,
    Name,
    Phase,
    View,
)
from deadpool.errors import SnapshotError
from deadpool.liveness.waiting import hash_name
from deadpool.runtime.faults import FaultReports
from deadpool.runtime.messages import (
    Assign,
    Attach,
    Captured,
    FirstStep,
    Groups,
    Note,
    Raised,
    Refused,
    Rehearsed,
    Restored,
    RestoreFailed,
    SegmentReply,
    Unwound,
    WorkerDone,
    WorkerToAgent,
)
from deadpool.runtime.once import OnceArea
from deadpool.runtime.once_areas import OnceAreas, segment_layout
from deadpool.runtime.parts import HostParts, first_name
from deadpool.runtime.restoring import Restoring, restore_extra_s
from deadpool.runtime.result import note_worker
from deadpool.runtime.waits import tell_view
from deadpool.runtime.workforce import Worker, WorkerState

RESPAWNS_OF_PARKED = 2  # a spare whose worker does not come up so often is broken


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCallbacks:
    """What the host asks of its agent."""

    members: Callable[[], dict[MemberId, Member]]
    replaced: Callable[[str], None]  # this member was replaced: become a new incarnation
    ended: Callable[[View], None]  # FINISHED or HALTED
    broken: Callable[[str], None]  # this host cannot run workers
    rendezvous_generation: Callable[[int], None]


@dataclass(slots=True)
class _Generation:
    """What belongs to one generation on this host."""

    number: int
    began_s: float = field(default_factory=time.monotonic)
    abort_acked: bool = False
    formed_acked: bool = False
    formed: set[int] = field(default_factory=set)  # ranks whose snapshot 0 is in their own bank
    held: set[int] = field(default_factory=set)  # ranks whose snapshot 0 is on its holder
    is_protected: bool = False
    restoring: Restoring | None = None
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
        self._areas = OnceAreas(member.id, parts, arrived=self._place_all)
        self._faults = FaultReports(member.id, parts)
        self._parked_losses = 0
        self._reserved: set[int] = set()  # local ranks for whose state this spare has made room

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
        if text := tell_view(view):
            self._parts.log.emit("view.told", generation=view.generation, text=text)
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

    def needs_view(self, hears_none_of: Callable[[Collection[MemberId]], bool]) -> bool:
        """Whether nothing happens until another View comes: a fault or the end was told, or nobody trains."""
        if self.slot is None:
            return self.view is not None and hears_none_of(self.view.slots)
        return self._generation.done or self._faults.has_reported

    def ranks(self) -> range:
        """Ranks of this host's slot."""
        if self.view is None or self.slot is None:
            return range(0)
        return self.view.ranks_of_slot(self.slot)

    def named(self) -> tuple[MemberId, ...]:
        """Members that the View names."""
        return () if self.view is None else (*self.view.slots, *self.view.leaving)

    def tick(self) -> None:
        if self.view is not None and self.view.phase is not Phase.ABORTING:
            self._faults.tick()
        if self._generation.restoring is not None:
            self._generation.restoring.tick()
        for worker in self._parts.workforce.workers:
            if worker.state is WorkerState.PARKED:
                self._place(worker)

    def _begin_generation(self, view: View) -> None:
        parts = self._parts
        if self._generation.restoring is not None:
            self._generation.restoring.close()
        self._generation = _Generation(view.generation)
        self._faults.begin(view.generation)
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
        self._areas.clear()
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
        if me in view.slots:
            workforce.replace_lost()
        workforce.abort(view.generation, view.reason, is_leaving=me in view.leaving)
        self._check_quiet()
        self._place_all()

    def _stall(self, view: View) -> None:
        if self.slot is None:
            return
        if view.rollback is None:
            self._parts.workforce.restart_all()
        else:
            self._parts.checkpoints.save(self.ranks(), view.rollback)  # while there is time
            slots = [slot for slot, member in enumerate(view.slots) if not member]
            vacant = [rank for slot in slots for rank in view.ranks_of_slot(slot)]
            self._parts.checkpoints.save_held(vacant, self.ranks(), view.rollback)

    def _restore(self, view: View) -> None:
        me = self._member.id
        if me not in view.slots or view.rollback is None:
            return
        self.slot = view.slots.index(me)
        self._parts.workforce.replace_lost()
        if self._generation.restoring is None:
            self._generation.restoring = Restoring(
                me, view, self._parts, self._areas, self._faults, self._callbacks.members
            )
            self._generation.restoring.start()
        self._place_all()

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
        assert self.view is not None
        once = self._areas.get(rank)
        if once is None:
            self._areas.ask(rank, self.view)
            return
        self._assign(worker, rank, once)
        self._areas.segment_for(rank, once)  # while the worker builds
        self._prepare(rank)

    def _rehearse(self, worker: Worker) -> None:
        rank = worker.handle.local_rank
        assert self.view is not None
        once = self._areas.get(rank)
        if once is None:
            self._areas.ask(rank, self.view)
            return
        worker.is_rehearsed = True
        self._assign(worker, rank, once, rehearse=True)
        if rank not in self._reserved:
            self._reserved.add(rank)
            self._parts.fetcher.reserve(segment_layout(once), self._on_no_room)

    def _on_no_room(self, why: str) -> None:
        self._faults.report(FaultKind.SPARE_FAILED, (), f"no room for the state of a rank: {why}", 0)

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
            who = (self._member.id, rank, worker.handle.pid, view.generation, role)
            self._parts.log.note(partial(note_worker, self._parts.run_dir, *who))
        self._parts.log.emit(
            "worker.assigned", generation=view.generation, rank=rank, pid=worker.handle.pid, role=role
        )

    # ---- abort ---------------------------------------------------------------------------------------

    def _check_quiet(self) -> None:
        """Ack ABORTING once no worker of this host has anything under way."""
        view, generation = self.view, self._generation
        if view is None or view.phase is not Phase.ABORTING or generation.abort_acked or self.slot is None:
            return
        workforce = self._parts.workforce
        if any(worker.state is WorkerState.ABORTING and not worker.is_stuck for worker in workforce.workers):
            return
        generation.abort_acked = True
        parts = self._parts
        parts.server.set_generation(view.generation)
        inventory = parts.store.inventory()
        lost = tuple(rank for rank in self.ranks() if workforce.is_lost(rank))
        last_step = max((worker.finished_step for worker in workforce.workers), default=0)
        ack = Ack(
            member=self._member.id,
            generation=view.generation,
            phase=Phase.ABORTING,
            inventory=inventory,
            lost_ranks=() if self._member.id in view.joining else lost,
            last_step=last_step,
            seconds=(("abort", time.monotonic() - generation.began_s),),
            groups=self._areas.groups_of(inventory.copies),
            restore_extra_s=restore_extra_s(parts),
        )
        parts.log.emit(
            "recovery.phase",
            generation=view.generation,
            phase="abort",
            seconds=time.monotonic() - generation.began_s,
        )
        parts.writer.put(view.generation, "ack of ABORTING", lambda: parts.registry.put_ack(ack))

    def _prepare(self, rank: int) -> None:
        if self._generation.restoring is not None:
            self._generation.restoring.prepare(rank)

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
                self._prepare(worker.rank)
            case Restored():
                if self._generation.restoring is not None:
                    self._generation.restoring.check_restored()
            case RestoreFailed(why=why, unreached=unreached):
                self._faults.not_rebuilt(worker, why, unreached)
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
                if message.problem:
                    self._faults.report(FaultKind.SPARE_FAILED, (), f"rehearsal: {message.problem}", 0)
            case Groups(names=names):
                worker.groups = {hash_name(name): text for name, text in names.items()}
            case Note(event=event, fields=fields):
                self._parts.log.emit(event, generation=self._generation.number, **fields)
            case _:
                pass

    def _on_raised(self, worker: Worker, message: Raised) -> None:
        view = self.view
        if view is None or view.phase is Phase.ABORTING:
            return
        self._faults.raised(worker.rank, message)

    def _on_attach(self, worker: Worker, message: Attach) -> None:
        rank = worker.rank
        once = message.once
        if self.view is not None and self.view.phase is Phase.FORMING:
            self._areas.put(rank, once)
            why = self._areas.check_memory(rank, once, self._member.host, self.view.nproc)
            if why:
                self._faults.bad_input(rank, why)
                return
        segment = self._areas.segment_for(rank, once)
        view = self.view
        load: Name | None = None
        if view is not None and view.phase is Phase.FORMING and view.rollback is not None:
            load = view.rollback
            segment.begin(0, load)
            try:
                blob_len = self._parts.checkpoints.load(rank, load, segment, 0, OnceArea.decode(once))
                segment.complete(0, blob_len=blob_len)
            except SnapshotError as error:
                segment.empty(0)
                self._faults.bad_input(rank, str(error))
                return
        self._parts.workforce.attached(worker)
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
        if generation.held != set(self.ranks()) or generation.formed_acked:
            return
        generation.formed_acked = True
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

    def on_unreaped(self, worker: Worker) -> None:
        """A killed worker does not go (stuck in the kernel): its rank moves to another host."""
        self._faults.unreaped(worker)
        self._check_quiet()  # its copies are whole, and others wait for them

    def on_lost(self, worker: Worker, cause: str) -> None:
        """A worker is gone. Its copies stay; a fresh one starts once a View says that the slot stays here."""
        view, generation = self.view, self._generation
        local_rank = worker.handle.local_rank
        self._parts.log.emit("worker.exited", rank=worker.rank, pid=worker.handle.pid, how=cause)
        if worker.handle.is_parked:
            self._parked_losses += 1
            if self._parked_losses > RESPAWNS_OF_PARKED:
                self._callbacks.broken(f"a parked worker {cause}, {self._parked_losses} times")
                return
        if worker.handle.is_parked or view is None:
            self._parts.workforce.replace(local_rank)
            return
        if view.phase is Phase.ABORTING and not generation.abort_acked:
            self._check_quiet()  # "rank r lost, copies kept": said in the ack
            return
        self._faults.lost(worker, cause)
