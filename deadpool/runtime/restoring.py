"""RESTORING on one host: have the rollback step in an own bank of each rank, then let the workers restore."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from deadpool.core.plan import NoLiveCopy, RankPlan, kept_names, merge_groups, plan_recovery
from deadpool.core.types import (
    Ack,
    FaultKind,
    Inventory,
    Member,
    MemberId,
    Name,
    Phase,
    ReplicatedGroup,
    Source,
    View,
)
from deadpool.errors import StoreUnavailable
from deadpool.runtime.faults import FaultReports
from deadpool.runtime.fetch import Fetched, SnapshotJob
from deadpool.runtime.messages import Restore
from deadpool.runtime.once import OnceArea
from deadpool.runtime.once_areas import OnceAreas
from deadpool.runtime.parts import HostParts
from deadpool.runtime.workforce import WorkerState
from deadpool.store.segment import BankState

logger = logging.getLogger(__name__)

RETRY_S = 0.5


def restore_extra_s(parts: HostParts) -> float:
    """What a host like this one may take to build the script again and to fetch its ranks' state."""
    store = parts.config.store
    fetch_s = store.transfer_timeout_s + parts.store.memory_bytes() / store.floor_rate_bytes_s
    return fetch_s + 2 * parts.workforce.build_s


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
        self._inventories: tuple[Inventory, ...] = ()
        self._is_closed = False
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

    def close(self) -> None:
        """A newer generation has begun: whatever arrives late counts no more."""
        self._is_closed = True

    def tick(self) -> None:
        """Plan if that was not possible yet; look again at what was missing."""
        if self._is_acked or time.monotonic() < self._retry_at_s:
            return
        self._retry_at_s = time.monotonic() + RETRY_S
        if self._plans is None:
            try:
                self._plans = self._plan()
            except (StoreUnavailable, NoLiveCopy) as error:
                logger.info("the acks of generation %d are not there: %s", self._view.generation, error)
                return
            self._parts.store.keep_only(self._kept())
        for rank in self._ranks:
            self.prepare(rank)

    def prepare(self, rank: int) -> None:
        """Bring the rollback step into a bank of `rank`. Called again whenever something has arrived."""
        segment, area = self._parts.store.own(rank), self._areas.get(rank)
        if self._is_acked or self._plans is None or segment is None or area is None:
            return  # once all stand restored the banks belong to training again
        bank = segment.bank_of(self._rollback)
        if bank is not None:
            self._banks[rank] = bank
            self.try_restore(rank)
            return
        busy = self._parts.fetcher.busy_banks(rank)
        banks = [bank for bank in (0, 1) if bank not in busy]
        if rank in self._fetching or not banks:
            return  # a fetch of an older generation still ends: looked at again at the next tick
        self._fetching.add(rank)
        empty = [bank for bank in banks if segment.bank_info(bank).state is BankState.EMPTY]
        bank = (empty or banks)[0]
        segment.begin(bank, self._rollback)
        once = OnceArea.decode(area)
        self._parts.fetcher.snapshot(
            SnapshotJob(
                rank=rank,
                name=self._rollback,
                sources=self._sources(rank),
                replicated=self._replicated_sources(rank, once),
                load=self._parts.checkpoints.load if self._view.source is Source.CHECKPOINT else None,
                bank=bank,
                segment=segment,
                once=once,
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
        if worker.state in (WorkerState.QUIET, WorkerState.ATTACHED) and not self._is_closed:
            self._parts.workforce.restore(
                worker,
                Restore(
                    generation=self._view.generation,
                    name=self._rollback,
                    bank=bank,
                    rendezvous=(host.address, host.rendezvous_port),
                    timeout_s=self._parts.config.communicator.rebuild_timeout_s
                    + restore_extra_s(self._parts),
                    peers=self._peers(),
                ),
            )

    def _peers(self) -> tuple[tuple[int, str, int], ...]:
        members = self._members()
        return tuple(
            (self._view.ranks_of_slot(slot)[0], members[each].address, members[each].control_port)
            for slot, each in enumerate(self._view.slots)
            if each != self._member and each in members
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
        self._inventories = tuple(ack.inventory for ack in acks if ack.inventory is not None)
        self._groups = merge_groups(acks)
        return {plan.rank: plan for plan in plan_recovery(self._view, self._inventories, self._groups)}

    def _kept(self) -> frozenset[Name]:
        return kept_names(self._view.world_size, self._inventories, self._rollback)

    def _sources(self, rank: int) -> tuple[MemberId, ...]:
        """Members with unique bytes and blob of a rank; the plan's choice first."""
        assert self._plans is not None
        planned = self._plans.get(rank, RankPlan(rank=rank)).unique_from
        others = [
            inventory.member
            for inventory in self._inventories
            for copies in inventory.copies
            if copies.rank == rank and self._rollback in (*copies.own, *copies.held)
        ]
        return tuple(dict.fromkeys(each for each in (planned, *others) if each))

    def _replicated_sources(
        self, rank: int, once: OnceArea
    ) -> tuple[tuple[int, int, tuple[tuple[int, MemberId], ...]], ...]:
        assert self._plans is not None
        spans = {tuple(ranks): (start, n_bytes) for ranks, start, n_bytes in once.spans}
        found = []
        for index, source, member in self._plans.get(rank, RankPlan(rank=rank)).replicated_from:
            group = self._groups[index].ranks
            others = [
                (copies.rank, inventory.member)
                for inventory in self._inventories
                for copies in inventory.copies
                if copies.rank in group and self._rollback in copies.own
            ]
            found.append((*spans[group], tuple(dict.fromkeys([(source, member), *others]))))
        return tuple(found)

    def _on_fetched(self, result: Fetched) -> None:
        job = result.job
        if self._is_closed or result.problem:
            job.segment.empty(job.bank)
        if self._is_closed:
            return
        if result.problem:
            kind = FaultKind.SPARE_FAILED if result.is_local else FaultKind.COLLECTIVE
            text = f"fetch of rank {job.rank}: {result.problem}"
            self._faults.report(kind, (job.rank,), text, self._rollback.step)
            return
        job.segment.complete(job.bank, blob_len=result.blob_len)
        self._fetch_s = max(self._fetch_s, result.seconds)
        self._banks[job.rank] = job.bank
        self.try_restore(job.rank)
