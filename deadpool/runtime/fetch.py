"""Getting copies from other hosts, off the agent's main thread: constructor records, and whole snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deadpool.core.plan import RankPlan
from deadpool.core.types import Member, MemberId, Name, ReplicatedGroup
from deadpool.errors import SnapshotError
from deadpool.runtime.once import OnceArea
from deadpool.store.fetch import fetch_once, fetch_replicated, fetch_unique
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.segment import Segment, SegmentKind
from deadpool.store.transport import Address, Transport, TransportFailed

ONCE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob:
    """One rank's state to be brought into a bank of its own segment."""

    plan: RankPlan
    load: Callable[[int, Name, Segment, int, OnceArea], None] | None  # from the checkpoint, not from peers
    name: Name
    bank: int
    segment: Segment
    once: OnceArea
    groups: tuple[ReplicatedGroup, ...]  # as the plan numbers them
    generation: int


class Fetcher:
    """Fetches in threads of its own, one per job; each ends within its deadline.

    Args:
        transport: carries the bytes.
        store: the own host's store, for what is already here.
        members: the members that exist now.
        post: runs a function on the agent's main thread.
    """

    def __init__(
        self,
        transport: Transport,
        store: HostMemoryStore,
        members: Callable[[], dict[MemberId, Member]],
        post: Callable[..., None],
    ) -> None:
        self._transport = transport
        self._store = store
        self._members = members
        self._post = post
        self._threads: list[threading.Thread] = []

    def once(
        self,
        rank: int,
        sources: Sequence[MemberId],
        generation: int,
        done: Callable[[int, bytes | None, str], None],
    ) -> None:
        """Get the write-once area of `rank` from the first source that has it.

        `done(rank, bytes, why not)` is called on the main thread.
        """

        def work() -> None:
            why = "no member is known to have it"
            for source in sources:
                try:
                    found, _ = fetch_once(
                        self._transport,
                        self._address(source),
                        rank,
                        generation=generation,
                        timeout_s=ONCE_TIMEOUT_S,
                    )
                except SnapshotError as error:
                    why = f"{source}: {error}"
                    continue
                self._post(done, rank, found, "")
                return
            self._post(done, rank, None, why)

        self._start(work, f"fetch-once-{rank}")

    def snapshot(self, job: SnapshotJob, done: Callable[[SnapshotJob, str, float], None]) -> None:
        """Bring a snapshot into a bank, COMPLETE at the end; `done(job, why not, seconds)`."""

        def work() -> None:
            started = time.monotonic()
            why = ""
            try:
                self._fetch_snapshot(job)
            except SnapshotError as error:
                job.segment.empty(job.bank)
                why = str(error)
            self._post(done, job, why, time.monotonic() - started)

        self._start(work, f"fetch-{job.plan.rank}")

    def close(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)

    def _start(self, work: Callable[[], None], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _address(self, member: MemberId) -> Address:
        found = self._members().get(member)
        if found is None:
            raise TransportFailed(f"member {member} is not registered any more")
        return (found.address, found.data_port)

    def _fetch_snapshot(self, job: SnapshotJob) -> None:
        segment, bank, plan = job.segment, job.bank, job.plan
        if job.load is not None:
            job.load(plan.rank, job.name, segment, bank, job.once)
            return
        segment.begin(bank, job.name)
        blob_len = self._copy_held(job)
        if blob_len is None:
            if plan.unique_from is None:
                raise TransportFailed(f"rank {plan.rank}: the plan expects {job.name} in the own bank")
            blob_len = fetch_unique(
                self._transport,
                self._address(plan.unique_from),
                plan.rank,
                job.name,
                generation=job.generation,
                into=segment,
                bank=bank,
            )
        spans = {tuple(ranks): (start, n_bytes) for ranks, start, n_bytes in job.once.spans}
        for index, source_rank, member in plan.replicated_from:
            start, n_bytes = spans[job.groups[index].ranks]
            fetch_replicated(
                self._transport,
                self._address(member),
                source_rank,
                job.name,
                generation=job.generation,
                offset_bytes=start,
                into=segment.replicated_view(bank)[start : start + n_bytes],
            )
        segment.complete(bank, blob_len=blob_len)

    def _copy_held(self, job: SnapshotJob) -> int | None:
        """This host holds a replica of the rank it takes over: nothing need travel."""
        held = self._store.held(job.plan.rank)
        if held is None or held.bank_of(job.name) is None:
            return None
        with self._store.read(job.plan.rank, job.name, kind=SegmentKind.HELD) as reader:
            source = reader.bank
            assert source is not None
            blob = held.blob_view(source)[: reader.info.blob_len]
            job.segment.blob_view(job.bank)[: len(blob)] = blob
            job.segment.unique_view(job.bank)[:] = held.unique_view(source)
            reader.finish()
            return reader.info.blob_len
