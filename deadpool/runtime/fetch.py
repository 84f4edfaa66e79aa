"""Getting copies from other hosts, off the agent's main thread: constructor records, and whole snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from deadpool.core.types import Member, MemberId, Name
from deadpool.errors import SnapshotError
from deadpool.runtime.once import OnceArea
from deadpool.store.checksum import iterate_chunks
from deadpool.store.fetch import fetch_once, fetch_replicated, fetch_unique
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.segment import Segment, SegmentKind, SegmentLayout
from deadpool.store.transport import Address, PeerRefused, Transport, TransportFailed

ONCE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob:
    """One rank's state to be brought into a bank of its own segment.

    Attributes:
        rank: logical rank.
        name: the snapshot.
        sources: members that have its unique bytes and blob; tried in this order.
        replicated: for each replicated group (start, bytes, sources as (rank, member), tried in order).
        load: reads it from the checkpoint instead, and returns the blob's length.
    """

    rank: int
    name: Name
    sources: tuple[MemberId, ...]
    replicated: tuple[tuple[int, int, tuple[tuple[int, MemberId], ...]], ...]
    load: Callable[[int, Name, Segment, int, OnceArea], int] | None
    bank: int
    segment: Segment
    once: OnceArea
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How a job ended; the bank is still WRITING."""

    job: SnapshotJob
    blob_len: int = 0
    problem: str = ""
    is_local: bool = False  # the problem lies with this host
    seconds: float = 0.0


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
        self._busy: set[tuple[int, int]] = set()  # (rank, bank) being written

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

    def reserve(self, layout: SegmentLayout, failed: Callable[[str], None]) -> None:
        """Make room for the state of a rank, whichever it will be; `failed(why)` comes on the main thread."""

        def work() -> None:
            try:
                self._store.reserve(layout)
            except SnapshotError as error:
                self._post(failed, str(error))

        self._start(work, "reserve")

    def busy_banks(self, rank: int) -> set[int]:
        """Banks of a rank that a fetch still writes, also one of an older generation."""
        return {bank for busy_rank, bank in self._busy if busy_rank == rank}

    def snapshot(self, job: SnapshotJob, done: Callable[[Fetched], None]) -> None:
        """Fill a bank that was begun; `done` completes or empties it, on the main thread."""
        self._busy.add((job.rank, job.bank))

        def work() -> None:
            started_s = time.monotonic()
            try:
                result = Fetched(job=job, blob_len=self._fetch_snapshot(job))
            except (TransportFailed, PeerRefused) as error:
                result = Fetched(job=job, problem=str(error))
            except (SnapshotError, OSError, ValueError) as error:
                result = Fetched(job=job, problem=str(error), is_local=True)
            self._post(finish, replace(result, seconds=time.monotonic() - started_s))

        def finish(result: Fetched) -> None:
            self._busy.discard((job.rank, job.bank))
            done(result)

        self._start(work, f"fetch-{job.rank}")

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

    def _fetch_snapshot(self, job: SnapshotJob) -> int:
        """Fill the bank; returns the blob's length."""
        segment, bank = job.segment, job.bank
        if job.load is not None:
            return job.load(job.rank, job.name, segment, bank, job.once)
        blob_len = self._copy_held(job)
        if blob_len is None:
            blob_len = _first_that_works(
                job.sources,
                lambda source: fetch_unique(
                    self._transport,
                    self._address(source),
                    job.rank,
                    job.name,
                    generation=job.generation,
                    into=segment,
                    bank=bank,
                ),
            )
        for start, n_bytes, sources in job.replicated:
            view = segment.replicated_view(bank)[start : start + n_bytes]

            def get(source: tuple[int, MemberId], start: int = start, view: memoryview = view) -> None:
                fetch_replicated(
                    self._transport,
                    self._address(source[1]),
                    source[0],
                    job.name,
                    generation=job.generation,
                    offset_bytes=start,
                    into=view,
                )

            _first_that_works(sources, get)
        return blob_len

    def _copy_held(self, job: SnapshotJob) -> int | None:
        """This host holds a replica of the rank it takes over: nothing need travel."""
        held = self._store.held(job.rank)
        if held is None or held.bank_of(job.name) is None:
            return None
        with self._store.read(job.rank, job.name, kind=SegmentKind.HELD) as reader:
            source = reader.bank
            assert source is not None
            blob_len = reader.info.blob_len
            copy_view(held.blob_view(source)[:blob_len], job.segment.blob_view(job.bank)[:blob_len])
            copy_view(held.unique_view(source), job.segment.unique_view(job.bank))
            reader.finish()
            return blob_len


def copy_view(source: memoryview, target: memoryview) -> None:
    """Copy chunk by chunk: one assignment of a large view would hold the GIL, and with it the heartbeats."""
    for offset, chunk in iterate_chunks(source):
        target[offset : offset + len(chunk)] = chunk


S = TypeVar("S")
T = TypeVar("T")


def _first_that_works(sources: Sequence[S], get: Callable[[S], T]) -> T:
    """Try each source, then each once more: one that dies in the middle is no fault of this host."""
    problem = TransportFailed("no live member has it")
    for source in (*sources, *sources):
        try:
            return get(source)
        except (TransportFailed, PeerRefused) as error:
            problem = TransportFailed(f"{source}: {error}")
    raise problem
