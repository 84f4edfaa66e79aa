"""RESTORING on one host: have the rollback step in an own bank of each rank, then let the workers restore."""

from __future__ import annotations

import time
from collections.abc import Callable

from deadpool.core.plan import NoLiveCopy, RankPlan, merge_groups, plan_recovery
from deadpool.core.types import (
    Ack,
    FaultKind,
    Member,
    MemberId,
    Phase,
    ReplicatedGroup,
    Source,
    View,
)
from deadpool.errors import StoreUnavailable
from deadpool.runtime.faults import FaultReports
from deadpool.runtime.fetch import SnapshotJob
from deadpool.runtime.messages import Restore
from deadpool.runtime.once import OnceArea
from deadpool.runtime.once_areas import OnceAreas
from deadpool.runtime.parts import HostParts
from deadpool.runtime.workforce import WorkerState
from deadpool.store.segment import BankState

RETRY_S = 0.5


class Restoring:
    """One RESTORING view, on the agent's main thread. Thrown away with its generation.

    Args:
        member: this incarnation.
        view: the RESTORING view.
        parts: see HostParts.
        areas: write-once areas.
        faults: where a failed fetch is reported.
        members: the members that exist now.
    """

    def __init__(
        self,
        member: MemberId,
        view: View,
        parts: HostParts,
        areas: OnceAreas,
        faults: FaultReports,
        members: Callable[[], dict[MemberId, Member]],
    ) -> None:
        assert view.rollback is not None
        self._member = member
        self._view = view
        self._rollback = view.rollback
        self._parts = parts
        self._areas = areas
        self._faults = faults
        self._members = members
        self._ranks = view.ranks_of_slot(view.slots.index(member))
        self._plans: dict[int, RankPlan] | None = None
        self._groups: tuple[ReplicatedGroup, ...] = ()
        self._banks: dict[int, int] = {}  # rank -> bank that holds the rollback step
        self._fetching: set[int] = set()
        self._fetch_s = 0.0
        self._is_acked = False
        self._retry_at_s = 0.0

    def start(self) -> None:
        """Forget what the job rolled back over, and plan; tried again while the store is away."""
        self._parts.store.empty_newer_than(self._rollback)
        self._parts.server.set_generation(self._view.generation, self._rollback)
        self.tick()

    def tick(self) -> None:
        if self._plans is not None or time.monotonic() < self._retry_at_s:
            return
        try:
            self._plans = self._plan()
        except (StoreUnavailable, NoLiveCopy) as error:
            self._parts.log.emit(
                "wait.long", generation=self._view.generation, waiting_for=f"the acks of all hosts ({error})"
            )
            self._retry_at_s = time.monotonic() + RETRY_S
            return
        for rank in self._ranks:
            self.prepare(rank)

    def prepare(self, rank: int) -> None:
        """Bring the rollback step into a bank of `rank`. Called again whenever something has arrived."""
        segment, area = self._parts.store.own(rank), self._areas.get(rank)
        if self._plans is None or segment is None or area is None:
            return
        bank = segment.bank_of(self._rollback)
        if bank is not None:
            self._banks[rank] = bank
            self.try_restore(rank)
        elif rank not in self._fetching:
            self._fetching.add(rank)
            free = [bank for bank in (0, 1) if segment.bank_info(bank).state is BankState.EMPTY]
            is_durable = self._view.source is Source.CHECKPOINT
            self._parts.fetcher.snapshot(
                SnapshotJob(
                    plan=self._plans.get(rank, RankPlan(rank=rank)),
                    name=self._rollback,
                    load=self._parts.checkpoints.load if is_durable else None,
                    bank=free[0] if free else 0,
                    segment=segment,
                    once=OnceArea.decode(area),
                    groups=self._groups,
                    generation=self._view.generation,
                ),
                self._on_fetched,
            )

    def try_restore(self, rank: int) -> None:
        """Tell the worker, if both it and its state are there."""
        worker = self._parts.workforce.by_rank(rank)
        host = self._members().get(self._view.rendezvous)
        bank = self._banks.get(rank)
        if worker is None or bank is None or host is None:
            return
        if worker.state in (WorkerState.QUIET, WorkerState.ATTACHED):
            self._parts.workforce.restore(
                worker,
                Restore(
                    generation=self._view.generation,
                    name=self._rollback,
                    bank=bank,
                    rendezvous=(host.address, host.rendezvous_port),
                ),
            )

    def check_restored(self) -> None:
        """Ack once every rank of this host stands at the rollback step."""
        workforce, parts, generation = self._parts.workforce, self._parts, self._view.generation
        if self._is_acked or not workforce.all_in(self._ranks, {WorkerState.RESTORED}):
            return
        self._is_acked = True
        seconds: dict[str, float] = {"fetch": self._fetch_s} if self._fetch_s else {}
        for worker in workforce.workers:
            for phase, value in worker.seconds.items():
                seconds[phase] = max(seconds.get(phase, 0.0), value)
        for phase, value in seconds.items():
            parts.log.emit("recovery.phase", generation=generation, phase=phase, seconds=value)
        ack = Ack(
            member=self._member,
            generation=generation,
            phase=Phase.RESTORING,
            seconds=tuple(seconds.items()),
        )
        parts.writer.put(generation, "ack of RESTORING", lambda: parts.registry.put_ack(ack))

    def _plan(self) -> dict[int, RankPlan]:
        acks = [
            ack for ack in self._parts.registry.acks(self._view.generation) if ack.phase is Phase.ABORTING
        ]
        inventories = [ack.inventory for ack in acks if ack.inventory is not None]
        self._groups = merge_groups(acks)
        return {plan.rank: plan for plan in plan_recovery(self._view, inventories, self._groups)}

    def _on_fetched(self, job: SnapshotJob, problem: str, seconds: float) -> None:
        rank = job.plan.rank
        if problem:
            if self._members().get(self._member) is not None:
                text = f"fetch of rank {rank}: {problem}"
                self._faults.report(FaultKind.SPARE_FAILED, (rank,), text, self._rollback.step)
            return
        self._fetch_s = max(self._fetch_s, seconds)
        self._banks[rank] = job.bank
        self.try_restore(rank)
