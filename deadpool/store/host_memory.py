"""All segments of one host, and who reads or writes which bank of them.

A segment is OWN (a rank of this host) or HELD (a replica for a rank of another host). Every thread that
reads a bank holds a `BankReader`, every stream that fills a held bank a `BankWriter`; whoever wants to
overwrite, empty or unmap a bank stops those first. A stopped reader cannot finish and a stopped writer
cannot commit, even if its thread is late to notice. One lock guards the books; no byte of a bank is
copied under it, so it is held for microseconds.

Workers write their own banks from other processes: nothing here locks them out. The agent stops the
readers before it passes a naming on (DESIGN 5), and a reader finds out by the bank's version.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

from deadpool.core.types import Inventory, MemberId, Name, RankCopies
from deadpool.errors import SnapshotError
from deadpool.store.memory_check import available_bytes
from deadpool.store.segment import BANKS, BankInfo, BankState, Segment, SegmentKind, SegmentLayout
from deadpool.store.transport import StreamStopped

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""How long stopping waits for a thread to let go of a bank: it does so within one chunk."""

RESERVE_TIMEOUT_S = 60.0
"""How long a rank's segment waits for a reserved one: 240 GB at 4 GB/s."""

_Key = tuple[SegmentKind, int]  # (own or held, rank)
_NO_BANK = -1  # the write-once area only


class _Lease:
    """Shared part of readers and writers: can be cancelled, and says when it is gone."""

    def __init__(self, store: HostMemoryStore, segment: Segment, key: _Key, bank: int) -> None:
        self.segment = segment
        self.key = key
        self.bank = bank
        self._store = store
        self.is_cancelled = False
        self._hook: Callable[[], None] | None = None

    def check(self) -> None:
        """Raise StreamStopped if somebody wants the bank."""
        if self.is_cancelled:
            raise StreamStopped(f"rank {self.key[1]} bank {self.bank}: the stream was stopped")

    def on_cancel(self, hook: Callable[[], None] | None) -> None:
        with self._store.condition:
            self._hook = hook
            if hook is not None and self.is_cancelled:
                hook()

    def cancel(self) -> None:
        with self._store.condition:
            self.is_cancelled = True
            if self._hook is not None:
                # Under the lock, so that it can never hit a connection that was passed on.
                self._hook()

    def close(self) -> None:
        """Let go of the bank."""
        with self._store.condition:
            self._hook = None
            self._store.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BankReader(_Lease):
    """Right to read one complete bank; made by `HostMemoryStore.read`."""

    def __init__(
        self, store: HostMemoryStore, segment: Segment, key: _Key, bank: int, info: BankInfo
    ) -> None:
        super().__init__(store, segment, key, bank)
        self.info = info

    def finish(self, checksum: int | None = None) -> None:
        """All bytes are read: give up the bank. The checksum, if given, is kept in its header.

        Raises:
            StreamStopped: stopped, or overwritten since `read`: the bytes may be mixed.
        """
        with self._store.condition:
            self.check()
            now = self.segment.bank_info(self.bank)
            if (now.state, now.version) != (BankState.COMPLETE, self.info.version):
                raise StreamStopped(f"rank {self.key[1]} bank {self.bank} was overwritten while it was read")
            if checksum is not None:
                self.segment.set_checksum(self.bank, self.info.version, checksum)
            self._store.release(self)


class OnceReader(_Lease):
    """Right to read a sealed write-once area; made by `HostMemoryStore.read_once`."""

    def finish(self) -> None:
        with self._store.condition:
            self.check()
            self._store.release(self)


class BankWriter(_Lease):
    """Right to fill one bank of a held segment; made by `HostMemoryStore.write_held`."""

    def __init__(
        self, store: HostMemoryStore, segment: Segment, key: _Key, bank: int, generation: int
    ) -> None:
        super().__init__(store, segment, key, bank)
        self.generation = generation

    def commit(self, *, blob_len: int, checksum: int, once: tuple[int, int] | None = None) -> None:
        """Make the bank COMPLETE, and seal `once` = (length, checksum) of the write-once area first.

        Raises:
            StreamStopped: fenced or replaced before this call.
        """
        with self._store.condition:
            self.check()
            if once is not None:
                self.segment.seal_once(*once)
            self.segment.complete(self.bank, blob_len=blob_len, checksum=checksum)
            self._store.release(self)

    def close(self) -> None:
        with self._store.condition:
            if self in self._store.leases:  # not committed: nothing of it may count
                self.segment.empty(self.bank)
        super().close()


class HostMemoryStore:
    """Owns the segments of one host. Thread-safe.

    Args:
        member: whose inventory this is; set it anew when the agent registers again.
        accept_limit_bytes: most memory that held segments may take; None: what the host has available.
        prefault: touch all pages of a segment when it is made.
    """

    def __init__(
        self, member: MemberId, *, accept_limit_bytes: int | None = None, prefault: bool = True
    ) -> None:
        self.member = member
        self.condition = threading.Condition()
        self.leases: set[_Lease] = set()
        self._accept_limit_bytes = accept_limit_bytes
        self._prefault = prefault
        self._segments: dict[_Key, Segment] = {}
        self._reserved: list[Segment] = []  # of no rank yet
        self._reserving = 0  # being made
        self._is_closed = False
        self._promised_bytes = 0  # held segments being made

    # -- segments

    def own(self, rank: int) -> Segment | None:
        with self.condition:
            return self._segments.get((SegmentKind.OWN, rank))

    def held(self, rank: int) -> Segment | None:
        with self.condition:
            return self._segments.get((SegmentKind.HELD, rank))

    def create_own(self, rank: int, layout: SegmentLayout) -> Segment:
        """Make a fresh segment for a rank of this host; one that was there before is dropped."""
        key = (SegmentKind.OWN, rank)
        self._install(key, None)  # first, so that the memory is not needed twice
        segment = self._take_reserved(layout)
        if segment is None:
            segment = Segment.create(f"deadpool-own-{rank}", layout, prefault=self._prefault)
        self._install(key, segment)
        return segment

    def reserve(self, layout: SegmentLayout) -> None:
        """Make a segment before it is known which rank needs it; `create_own` takes it.

        For a spare: touching every page of a large state takes seconds, which it has only while it waits.

        Raises:
            SnapshotError: the host has no memory for it.
        """
        with self.condition:
            self._reserving += 1
        segment = None
        try:
            segment = Segment.create("deadpool-reserved", layout, prefault=self._prefault)
        finally:
            with self.condition:
                self._reserving -= 1
                if segment is not None and not self._is_closed:
                    self._reserved.append(segment)
                    segment = None
                self.condition.notify_all()
        if segment is not None:  # closed meanwhile
            segment.close()

    def create_held(self, rank: int, layout: SegmentLayout) -> Segment:
        """Make a segment for replicas of a rank; one that was there before is dropped.

        Raises:
            SnapshotError: held segments would take more than this host accepts, or has.
        """
        key = (SegmentKind.HELD, rank)
        size_bytes = layout.segment_bytes(SegmentKind.HELD)
        self._install(key, None)
        with self.condition:
            left_bytes = self._acceptable_bytes()
            if size_bytes > left_bytes:
                raise SnapshotError(f"rank {rank} needs {size_bytes} bytes here, {left_bytes} are left")
            self._promised_bytes += size_bytes
        try:
            segment = Segment.create(
                f"deadpool-held-{rank}", layout, kind=SegmentKind.HELD, prefault=self._prefault
            )
            self._install(key, segment)
        finally:
            with self.condition:
                self._promised_bytes -= size_bytes
        return segment

    def memory_bytes(self) -> int:
        with self.condition:
            return sum(segment.size_bytes for segment in (*self._segments.values(), *self._reserved))

    # -- readers and writers

    def read(self, rank: int, name: Name, *, kind: SegmentKind, bank: int | None = None) -> BankReader:
        """Start to read a complete bank.

        Raises:
            SnapshotError: no such copy here (in that bank, if one is given).
        """
        with self.condition:
            key = (kind, rank)
            segment = self._segments.get(key)
            found = segment.bank_of(name) if segment is not None else None
            if segment is None or found is None or bank not in (None, found):
                raise SnapshotError(f"no complete copy {name} of rank {rank} here ({kind.name.lower()})")
            if not segment.once_is_sealed:
                raise SnapshotError(f"rank {rank}: without its write-once area no copy counts; seal it first")
            reader = BankReader(self, segment, key, found, segment.bank_info(found))
            self.leases.add(reader)
            return reader

    def read_once(self, rank: int) -> OnceReader:
        """Start to read a sealed write-once area, own or held.

        Raises:
            SnapshotError: there is none here.
        """
        with self.condition:
            for kind in SegmentKind:
                segment = self._segments.get((kind, rank))
                if segment is not None and segment.once_is_sealed:
                    reader = OnceReader(self, segment, (kind, rank), _NO_BANK)
                    self.leases.add(reader)
                    return reader
        raise SnapshotError(f"no write-once area of rank {rank} here")

    def write_held(self, rank: int, bank: int, name: Name, *, generation: int, with_once: bool) -> BankWriter:
        """Open a bank of a held segment for a stream. Whatever it held counts no more.

        The caller holds `condition`, has decided that the bank may be overwritten and has seen that
        nobody `uses` it.
        """
        key = (SegmentKind.HELD, rank)
        segment = self._segments[key]
        writer = BankWriter(self, segment, key, bank, generation)
        if with_once:
            segment.unseal_once()
        segment.begin(bank, name)
        self.leases.add(writer)
        return writer

    def is_used(self, rank: int, bank: int, kind: SegmentKind) -> bool:
        """Whether a thread of this process reads or writes that bank."""
        with self.condition:
            return any(lease.key == (kind, rank) and lease.bank == bank for lease in self.leases)

    def release(self, lease: _Lease) -> None:
        """Called by leases, under `condition`."""
        self.leases.discard(lease)
        self.condition.notify_all()

    def stop_streams_reading(
        self, rank: int, bank: int, *, kind: SegmentKind = SegmentKind.OWN, timeout_s: float = STOP_TIMEOUT_S
    ) -> bool:
        """Stop every thread that reads a bank; return once none does.

        Call it before a naming that overwrites the bank is passed on. A stream so stopped never
        becomes COMPLETE at its holder.

        Returns:
            Whether anything was stopped. A thread that does not let go in time is logged; what it
            reads can never become COMPLETE either.
        """
        return self._stop(
            lambda lease: lease.key == (kind, rank) and lease.bank == bank and isinstance(lease, BankReader),
            timeout_s,
        )

    def stop_writers(
        self, is_meant: Callable[[int, int], bool], *, timeout_s: float = STOP_TIMEOUT_S
    ) -> bool:
        """Stop the streams that fill held banks and for which `is_meant(rank, generation)` holds."""

        def is_wanted(lease: _Lease) -> bool:
            return isinstance(lease, BankWriter) and is_meant(lease.key[1], lease.generation)

        return self._stop(is_wanted, timeout_s)

    # -- what is here

    def banks(self, rank: int, kind: SegmentKind) -> tuple[BankInfo, ...]:
        """Both banks of a segment; () if there is none, or none that counts yet."""
        with self.condition:
            segment = self._segments.get((kind, rank))
            return tuple(segment.bank_info(bank) for bank in BANKS) if segment is not None else ()

    def inventory(self, *, verify: bool = True) -> Inventory:
        """All complete copies on this host.

        Args:
            verify: recompute the checksums of banks that have one (30 GiB/s); one that fails is
                emptied and logged. With False the headers are believed.
        """
        copies: dict[int, dict[SegmentKind, tuple[Name, ...]]] = {}
        with self.condition:
            keys = sorted(self._segments, key=lambda key: (key[1], key[0]))
        for kind, rank in keys:
            copies.setdefault(rank, {})[kind] = self._complete_names(rank, kind, verify)
        return Inventory(
            member=self.member,
            copies=tuple(
                RankCopies(rank=rank, own=by.get(SegmentKind.OWN, ()), held=by.get(SegmentKind.HELD, ()))
                for rank, by in sorted(copies.items())
            ),
        )

    def empty_newer_than(self, name: Name) -> None:
        """Empty every copy newer than `name`, and every bank that is not complete.

        For RESTORING: the workers are quiet, and streams of older generations are fenced.
        """
        with self.condition:
            segments = list(self._segments.items())
        for key, segment in segments:
            for bank in BANKS:
                complete = segment.bank_info(bank).complete_name
                if complete is None or complete > name:
                    self._stop(_uses(key, bank), STOP_TIMEOUT_S)
                    segment.empty(bank)

    def keep_only(self, names: Collection[Name]) -> None:
        """Empty every complete copy of another name. For RESTORING, once it is known what stays."""
        with self.condition:
            segments = list(self._segments.items())
        for key, segment in segments:
            for bank in BANKS:
                complete = segment.bank_info(bank).complete_name
                if complete is not None and complete not in names:
                    self._stop(_uses(key, bank), STOP_TIMEOUT_S)
                    segment.empty(bank)

    def empty_held(self, rank: int) -> None:
        """Give up the replicas of a rank: another holder has its committed copy."""
        self._install((SegmentKind.HELD, rank), None)

    def empty_all(self) -> None:
        """Drop every segment: this host starts anew."""
        with self.condition:
            keys = list(self._segments)
            reserved, self._reserved = self._reserved, []
        for segment in reserved:
            segment.close()
        for key in keys:
            self._install(key, None)

    def close(self) -> None:
        with self.condition:
            self._is_closed = True
        self.empty_all()

    # -- helpers

    def _acceptable_bytes(self) -> int:
        """What further held segments may take: within the limit given, and within what the host has."""
        left_bytes = available_bytes() - self._promised_bytes
        if self._accept_limit_bytes is not None:
            held_bytes = sum(
                segment.size_bytes
                for (kind, _), segment in self._segments.items()
                if kind is SegmentKind.HELD
            )
            left_bytes = min(left_bytes, self._accept_limit_bytes - held_bytes - self._promised_bytes)
        return max(0, left_bytes)

    def _take_reserved(self, layout: SegmentLayout) -> Segment | None:
        """A reserved segment that fits. If none does, one of them makes room for what is made instead."""
        with self.condition:
            # One that is being made will be there sooner than one that is begun now.
            self.condition.wait_for(lambda: not self._reserving, RESERVE_TIMEOUT_S)
            if not self._reserved:
                return None
            fitting = [segment for segment in self._reserved if segment.layout == layout]
            segment = (fitting or self._reserved)[0]
            self._reserved.remove(segment)
        if fitting:
            return segment
        segment.close()
        return None

    def _install(self, key: _Key, segment: Segment | None) -> None:
        self._stop(lambda lease: lease.key == key, STOP_TIMEOUT_S)
        with self.condition:
            previous = self._segments.pop(key, None)
            if segment is not None:
                self._segments[key] = segment
        if previous is not None:
            previous.close()

    def _stop(self, is_meant: Callable[[_Lease], bool], timeout_s: float) -> bool:
        with self.condition:
            meant = [lease for lease in self.leases if is_meant(lease)]
            for lease in meant:
                lease.cancel()
            if not self.condition.wait_for(lambda: self.leases.isdisjoint(meant), timeout_s):
                # Bounded, since agents call this on their main thread. It is safe: a cancelled lease can
                # neither finish nor commit, and its views keep the mapping alive.
                left = [(lease.key, lease.bank) for lease in meant if lease in self.leases]
                logger.error("threads did not let go of %s within %.1f s", left, timeout_s)
            return bool(meant)

    def _complete_names(self, rank: int, kind: SegmentKind, verify: bool) -> tuple[Name, ...]:
        names = []
        for name in (info.complete_name for info in self.banks(rank, kind)):
            if name is None:
                continue
            try:
                with self.read(rank, name, kind=kind) as reader:
                    if verify and not reader.segment.has_intact_bytes(reader.bank):
                        with self.condition:
                            reader.finish()  # raises if it was overwritten meanwhile: that is no corruption
                            reader.segment.empty(reader.bank)
                        logger.error("rank %d: %s (%s) fails its checksum, emptied", rank, name, kind.name)
                        continue
                names.append(name)
            except SnapshotError as error:
                logger.info("rank %d: copy %s (%s) is not listed: %s", rank, name, kind.name, str(error))
        return tuple(names)


def _uses(key: _Key, bank: int) -> Callable[[_Lease], bool]:
    return lambda lease: lease.key == key and lease.bank == bank
