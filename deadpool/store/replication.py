"""Have the snapshots of this host's ranks held elsewhere.

A push is queued with `push_captured` and sent by one of the lanes' threads: small ones (at most one
chunk: the blob of a DDP rank) at normal priority, bulk ones at nice 19. A rank has at most one stream
at a time, and its pushes go in the order in which they were queued: re-protection queues the rollback
copy first.

A push ends in exactly one of three ways: `on_held` (the holder answered that the copy is complete
there), `on_failed` (refused, or two attempts failed), or nothing at all, because `stop`,
`set_generation` or `close` ended it. Callbacks run in the lanes' threads and must not block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool.core.types import MemberId, Name
from deadpool.errors import SnapshotError
from deadpool.store.checksum import CHUNK_BYTES, RunningChecksum
from deadpool.store.host_memory import STOP_TIMEOUT_S, BankReader, HostMemoryStore
from deadpool.store.metrics import Metrics
from deadpool.store.segment import SegmentKind
from deadpool.store.transport import (
    Address,
    Area,
    Lane,
    PeerRefused,
    StreamHeader,
    StreamStopped,
    Transport,
    TransportFailed,
    Views,
    lower_priority,
    timeout_for,
)

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""A push is sent, and after a failure sent once more over a new connection."""
CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Push:
    rank: int
    name: Name
    bank: int
    to_member: MemberId
    keep: Name | None
    generation: int
    lane: Lane
    is_stopped: bool = False  # no bank is read for it any more
    reader: BankReader | None = field(default=None)


class Replicator:
    """Sends copies of own banks to their holders.

    Args:
        store: whose own banks are sent.
        transport: carries them; closed by its owner, after this.
        address_of: data address of a member; None if it is unknown.
        on_held: called with (rank, name) after the holder's answer.
        on_failed: called with (rank, name, reason).
        timeout_s: limit of one attempt for a number of bytes.
    """

    def __init__(
        self,
        store: HostMemoryStore,
        transport: Transport,
        *,
        address_of: Callable[[MemberId], Address | None],
        on_held: Callable[[int, Name], None],
        on_failed: Callable[[int, Name, str], None],
        timeout_s: Callable[[int], float] = timeout_for,
    ) -> None:
        self.metrics = Metrics("bytes_sent", "streams_completed", "streams_stopped", "streams_failed")
        self._store = store
        self._transport = transport
        self._address_of = address_of
        self._on_held = on_held
        self._on_failed = on_failed
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._generation = 0
        self._is_closed = False
        self._queue: list[_Push] = []
        self._active: list[_Push] = []
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"deadpool-push-{lane.name}", daemon=True)
            for lane in Lane
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def push_captured(self, rank: int, name: Name, bank: int, to_member: MemberId, keep: Name | None) -> None:
        """Queue the copy `name` in own bank `bank` of `rank` for `to_member`.

        Args:
            rank: logical rank.
            name: what the bank holds.
            bank: own bank to read.
            to_member: its holder.
            keep: committed name, which the holder must not overwrite.
        """
        segment = self._store.own(rank)  # None fails in the lane's thread, where callbacks belong
        n_bytes = segment.bank_info(bank).blob_len + segment.layout.unique_bytes if segment else 0
        with self._changed:
            if self._is_closed:
                return
            self._queue.append(
                _Push(
                    rank=rank,
                    name=name,
                    bank=bank,
                    to_member=to_member,
                    keep=keep,
                    generation=self._generation,
                    lane=Lane.SMALL if n_bytes <= CHUNK_BYTES else Lane.BULK,
                )
            )
            self._changed.notify_all()

    def stop(self, rank: int, bank: int) -> bool:
        """Stop every stream that reads or would read a bank; return once no thread reads it.

        A stream stopped before its last byte was read never becomes COMPLETE at the holder and calls
        nothing back. One that was read to its end and only waits for the holder's answer goes on: its
        bytes are whole, and `on_held` may still come.

        Returns:
            Whether anything was stopped.
        """
        dropped, _ = self._mark_stopped(lambda push: (push.rank, push.bank) == (rank, bank))
        # Fetches that read the bank are stopped too: it is about to be overwritten.
        return self._store.stop_streams_reading(rank, bank) or dropped > 0

    def set_generation(self, generation: int) -> None:
        """Stop every push of an older generation, also those that wait for an answer; no callback comes."""
        with self._changed:
            self._generation = max(self._generation, generation)
        self._abandon(lambda push: push.generation < generation)

    def close(self) -> None:
        """Stop everything and join the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._abandon(lambda _: True)
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            logger.error("replication threads still running %.0f s after close: %s", CLOSE_TIMEOUT_S, left)

    @property
    def is_running(self) -> bool:
        """False once a lane's thread has died: nothing is protected any more."""
        return all(thread.is_alive() for thread in self._threads)

    # -- stopping

    def _mark_stopped(self, is_meant: Callable[[_Push], bool]) -> tuple[int, list[_Push]]:
        """Drop what is queued, let nothing active read again; return (number dropped, active ones)."""
        with self._changed:
            kept = [push for push in self._queue if not is_meant(push)]
            dropped = len(self._queue) - len(kept)
            self._queue = kept
            active = [push for push in self._active if is_meant(push)]
            for push in active:
                push.is_stopped = True
            self._changed.notify_all()
        self.metrics.add(streams_stopped=dropped)
        return dropped, active

    def _abandon(self, is_meant: Callable[[_Push], bool]) -> None:
        _, active = self._mark_stopped(is_meant)
        with self._changed:
            readers = [push.reader for push in active]
        for reader in readers:
            if reader is not None:
                reader.cancel()  # also wakes one that waits for its holder's answer
        with self._changed:
            if not self._changed.wait_for(lambda: not any(p in self._active for p in active), STOP_TIMEOUT_S):
                logger.error("pushes of an older generation did not end within %.0f s", STOP_TIMEOUT_S)

    # -- the lanes' threads

    def _run(self, lane: Lane) -> None:
        if lane is Lane.BULK:
            lower_priority()
        while (push := self._next(lane)) is not None:
            reason = self._send(push)
            with self._changed:
                self._active.remove(push)
                is_current = push.generation == self._generation and not self._is_closed
                is_stopped = push.is_stopped and reason is not None
                self._changed.notify_all()
            if is_stopped or not is_current:
                self.metrics.add(streams_stopped=1)
            elif reason is None:
                self.metrics.add(streams_completed=1)
                self._on_held(push.rank, push.name)
            else:
                self.metrics.add(streams_failed=1)
                self._on_failed(push.rank, push.name, reason)

    def _next(self, lane: Lane) -> _Push | None:
        with self._changed:
            while not self._is_closed:
                busy = {push.rank for push in self._active}
                for push in self._queue:
                    if push.rank in busy:
                        continue
                    if push.lane is lane:
                        self._queue.remove(push)
                        self._active.append(push)
                        return push
                    busy.add(push.rank)  # an earlier push of that rank belongs to the other lane
                self._changed.wait()
            return None

    def _send(self, push: _Push) -> str | None:
        """Send one push; return why it failed, or None."""
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                self._attempt(push)
                return None
            except StreamStopped as error:
                return str(error)
            except PeerRefused as error:
                return str(error)
            except TransportFailed as error:
                reason = str(error)
                logger.info("rank %d %s: %s", push.rank, push.name, reason)
            except SnapshotError as error:  # the bank does not hold that copy any more
                return str(error)
            if push.is_stopped:
                return reason
        return reason

    def _attempt(self, push: _Push) -> None:
        address = self._address_of(push.to_member)
        if address is None:
            raise TransportFailed(f"no address of member {push.to_member}")
        with self._store.read(push.rank, push.name, kind=SegmentKind.OWN, bank=push.bank) as reader:
            with self._changed:
                push.reader = reader
                if push.is_stopped:  # `stop` may have come before the reader was known to the store
                    raise StreamStopped(f"rank {push.rank} bank {push.bank}: the stream was stopped")
            segment = reader.segment
            header = StreamHeader(
                rank=push.rank,
                name=push.name,
                generation=push.generation,
                keep=push.keep,
                layout=segment.layout,
                blob_len=reader.info.blob_len,
                once_len=segment.once_len,
                once_checksum=segment.once_checksum,
            )
            self._transport.push(
                address,
                header,
                _PushSource(reader, self.metrics),
                lane=push.lane,
                timeout_s=self._timeout_s(header.travelling_bytes + header.once_len),
            )


class _PushSource:
    """Reads an own bank for its holder."""

    def __init__(self, reader: BankReader, metrics: Metrics) -> None:
        segment, bank = reader.segment, reader.bank
        self._reader = reader
        self._metrics = metrics
        self._checksum = RunningChecksum()
        self._sent_bytes = 0
        self._areas = (
            (Area.ONCE, segment.once_view()[: segment.once_len]),
            (Area.BLOB, segment.blob_view(bank)[: reader.info.blob_len]),
            (Area.UNIQUE, segment.unique_view(bank)),
        )

    @property
    def areas(self) -> Views:
        return self._areas

    def check(self) -> None:
        self._reader.check()

    def on_cancel(self, hook: Callable[[], None] | None) -> None:
        self._reader.on_cancel(hook)

    def sent(self, n_bytes: int) -> None:
        self._sent_bytes += n_bytes
        self._reader.segment.set_sent_bytes(self._reader.bank, self._sent_bytes)
        self._metrics.add(bytes_sent=n_bytes)

    def chunk_sent(self, area: Area, digest: int) -> None:
        if area is not Area.ONCE:
            self._checksum.add(digest)

    def finish(self) -> int:
        checksum = self._checksum.value()
        self._reader.finish(checksum)
        return checksum
