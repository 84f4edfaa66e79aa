"""What a host does with streams and fetches that arrive: accept, refuse, serve.

The rules of a holder (DESIGN 5):
- nothing sent in an older generation than the one acked (`set_generation`) is accepted; a stream of an
  older generation that is under way is broken before `set_generation` returns;
- `choose_bank` (deadpool.core.commit) says which bank a stream may fill; whatever it says, a stream
  never overwrites the only complete copy of its rank;
- no copy is complete without the write-once area that belongs to it;
- sizes announced by a peer are bounded before any memory is taken.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from deadpool.core.commit import choose_holder_bank
from deadpool.core.types import Name
from deadpool.errors import ReplicaCorrupt, SnapshotError
from deadpool.store.checksum import RunningChecksum
from deadpool.store.host_memory import BankReader, BankWriter, HostMemoryStore, OnceReader
from deadpool.store.metrics import Metrics
from deadpool.store.segment import BankInfo, BankState, Segment, SegmentKind
from deadpool.store.transport import (
    Address,
    Area,
    CopyInfo,
    FetchRequest,
    Part,
    PeerRefused,
    Sink,
    Source,
    StreamHeader,
    Transport,
    Views,
)

logger = logging.getLogger(__name__)

BankChoice = Callable[[Sequence[Name | None], Name, Name | None, Name | None], int | None]
"""(complete name per bank, incoming, keep, rollback) -> bank to fill; None: refuse."""

MAX_RANK = 1 << 24
_OPEN_ATTEMPTS = 4


class DataServer:
    """Endpoint of one host: receives replicas and serves fetches from its store.

    Args:
        store: where copies go to and come from.
        transport: carries them; closed by its owner.
        choose_bank: which held bank a stream may fill.
    """

    def __init__(
        self, store: HostMemoryStore, transport: Transport, *, choose_bank: BankChoice = choose_holder_bank
    ) -> None:
        self.metrics = Metrics(
            "bytes_received", "fetch_bytes_sent", "streams_completed", "streams_stopped", "streams_failed"
        )
        self._store = store
        self._transport = transport
        self._choose_bank = choose_bank
        self._lock = threading.Lock()
        self._generation = 0
        self._rollback: Name | None = None

    def start(self) -> Address:
        """Serve from now on; returns the address that peers connect to."""
        return self._transport.serve(self)

    def set_generation(self, generation: int, rollback: Name | None = None) -> None:
        """Refuse whatever is sent in an older generation; returns once no older stream writes any more.

        Call it before acking anything of `generation`, and again once the rollback name is fixed.
        """
        with self._lock:
            if generation < self._generation:
                return
            if generation > self._generation or rollback is not None:
                self._rollback = rollback
            self._generation = generation
        self._store.stop_writers(lambda _, of_stream: of_stream < generation)

    # -- Endpoint

    def open_sink(
        self, header: StreamHeader, cancel: Callable[[], None]
    ) -> AbstractContextManager[Sink] | None:
        try:
            writer = self._open_writer(header)
        except PeerRefused as error:
            logger.info("rank %d %s: stream refused: %s", header.rank, header.name, str(error))
            raise
        if writer is None:
            return None
        writer.on_cancel(cancel)
        return self._receive(_ReplicaSink(writer, header, self.metrics))

    def open_source(self, request: FetchRequest) -> tuple[CopyInfo, AbstractContextManager[Source]]:
        self._refuse_older(request.generation)
        reader = self._open_reader(request)
        try:
            areas = _areas_of(request, reader)
        except BaseException:
            reader.close()
            raise
        info = CopyInfo(
            layout=reader.segment.layout,
            blob_len=reader.info.blob_len if isinstance(reader, BankReader) else 0,
            once_len=reader.segment.once_len,
            areas=tuple((area, len(view)) for area, view in areas),
        )
        return info, _serve(_FetchSource(reader, areas, self.metrics))

    # -- helpers

    @contextmanager
    def _receive(self, sink: _ReplicaSink) -> Iterator[Sink]:
        try:
            yield sink
        finally:
            was_cancelled = sink.writer.is_cancelled
            sink.writer.close()
            outcome = "completed" if sink.is_committed else "stopped" if was_cancelled else "failed"
            self.metrics.add(**{f"streams_{outcome}": 1})

    def _refuse_older(self, generation: int) -> Name | None:
        with self._lock:
            if generation < self._generation:
                raise PeerRefused(f"generation {generation} is over, this host acked {self._generation}")
            return self._rollback

    def _open_writer(self, header: StreamHeader) -> BankWriter | None:
        _check_sizes(header)
        self._refuse_older(header.generation)
        # The sender has one stream per rank: an older one is a connection that it gave up.
        self._store.stop_writers(lambda rank, _: rank == header.rank)
        for _ in range(_OPEN_ATTEMPTS):
            segment = self._segment_for(header)
            with self._store.condition:
                if self._store.held(header.rank) is not segment:
                    continue
                rollback = self._refuse_older(header.generation)
                if _has_copy(segment, header):
                    return None
                bank = self._bank_for(segment, header, rollback)
                if not self._store.is_used(header.rank, bank, SegmentKind.HELD):
                    return self._store.write_held(
                        header.rank,
                        bank,
                        header.name,
                        generation=header.generation,
                        with_once=_needs_once(segment, header),
                    )
            # Somebody fetches from that bank; overwriting breaks that fetch, as it would any reader's.
            self._store.stop_streams_reading(header.rank, bank, kind=SegmentKind.HELD)
        raise PeerRefused(f"rank {header.rank}: other streams keep its banks busy")

    def _segment_for(self, header: StreamHeader) -> Segment:
        segment = self._store.held(header.rank)
        if segment is not None and segment.layout == header.layout:
            return segment
        if segment is not None and any(info.state is BankState.COMPLETE for info in _banks(segment)):
            raise PeerRefused(f"rank {header.rank} has another layout than the copies held here")
        try:
            return self._store.create_held(header.rank, header.layout)
        except SnapshotError as error:
            raise PeerRefused(f"holder is full: {error}") from error

    def _bank_for(self, segment: Segment, header: StreamHeader, rollback: Name | None) -> int:
        banks = _banks(segment)
        complete = [info.state is BankState.COMPLETE for info in banks]
        if any(complete) and _needs_once(segment, header):
            raise PeerRefused(f"rank {header.rank} has another write-once area than the copies held here")
        names = [info.complete_name for info in banks]
        bank = self._choose_bank(names, header.name, header.keep, rollback)
        if bank is None:
            raise PeerRefused(f"rank {header.rank}: no bank may be overwritten by {header.name} now")
        if complete[bank] and not complete[1 - bank]:
            raise PeerRefused(f"rank {header.rank}: {banks[bank].name} is the only complete copy here")
        return bank

    def _open_reader(self, request: FetchRequest) -> BankReader | OnceReader:
        if request.name is None and request.part is not Part.ONCE:
            raise PeerRefused("only the write-once area can be fetched without a name")
        try:
            if request.name is None:
                return self._store.read_once(request.rank)
            own = self._store.own(request.rank)
            is_own = own is not None and own.bank_of(request.name) is not None
            kind = SegmentKind.OWN if is_own or request.part is Part.REPLICATED else SegmentKind.HELD
            return self._store.read(request.rank, request.name, kind=kind)
        except SnapshotError as error:
            raise PeerRefused(str(error)) from error


class _ReplicaSink:
    """Fills a held bank."""

    def __init__(self, writer: BankWriter, header: StreamHeader, metrics: Metrics) -> None:
        self.writer = writer
        self.is_committed = False
        self._header = header
        self._metrics = metrics
        self._once = RunningChecksum()
        self._copied = RunningChecksum()
        segment = writer.segment
        self._with_once = _needs_once(segment, header)
        areas = [
            (Area.BLOB, segment.blob_view(writer.bank)[: header.blob_len]),
            (Area.UNIQUE, segment.unique_view(writer.bank)),
        ]
        if self._with_once:
            areas.insert(0, (Area.ONCE, segment.once_view()[: header.once_len]))
        self._areas = areas

    @property
    def areas(self) -> Views:
        return self._areas

    def check(self) -> None:
        self.writer.check()

    def chunk_received(self, area: Area, n_bytes: int, digest: int) -> None:
        (self._once if area is Area.ONCE else self._copied).add(digest)
        self._metrics.add(bytes_received=n_bytes)

    def commit(self, checksum: int) -> None:
        header = self._header
        if self._with_once and self._once.value() != header.once_checksum:
            raise ReplicaCorrupt(f"rank {header.rank}: write-once area fails its checksum")
        if self._copied.value() != checksum:
            raise ReplicaCorrupt(f"rank {header.rank}: copy {header.name} fails its checksum")
        once = (header.once_len, header.once_checksum) if self._with_once else None
        self.writer.commit(blob_len=header.blob_len, checksum=checksum, once=once)
        self.is_committed = True


class _FetchSource:
    """Reads a bank, or the write-once area, for a fetch."""

    def __init__(self, reader: BankReader | OnceReader, areas: Views, metrics: Metrics) -> None:
        self.reader = reader
        self._areas = areas
        self._metrics = metrics
        self._checksum = RunningChecksum()

    @property
    def areas(self) -> Views:
        return self._areas

    def check(self) -> None:
        self.reader.check()

    def on_cancel(self, hook: Callable[[], None] | None) -> None:
        self.reader.on_cancel(hook)

    def sent(self, n_bytes: int) -> None:
        self._metrics.add(fetch_bytes_sent=n_bytes)

    def chunk_sent(self, area: Area, digest: int) -> None:
        self._checksum.add(digest)

    def finish(self) -> int:
        self.reader.finish()
        return self._checksum.value()


@contextmanager
def _serve(source: _FetchSource) -> Iterator[Source]:
    with source.reader:
        yield source


def _banks(segment: Segment) -> tuple[BankInfo, ...]:
    return segment.bank_info(0), segment.bank_info(1)


def _needs_once(segment: Segment, header: StreamHeader) -> bool:
    if header.layout.once_bytes == 0:
        return False
    has = (segment.once_len, segment.once_checksum) == (header.once_len, header.once_checksum)
    return not (segment.once_is_sealed and has)


def _has_copy(segment: Segment, header: StreamHeader) -> bool:
    return segment.bank_of(header.name) is not None and not _needs_once(segment, header)


def _check_sizes(header: StreamHeader) -> None:
    layout = header.layout
    sizes = (layout.once_bytes, layout.blob_capacity, layout.unique_bytes, layout.replicated_bytes)
    is_sane = (
        0 <= header.rank < MAX_RANK
        and all(0 <= size < 1 << 48 for size in sizes)
        and 0 <= header.blob_len <= layout.blob_capacity
        and 0 <= header.once_len <= layout.once_bytes
    )
    if not is_sane:
        raise PeerRefused(f"the stream's sizes make no sense: {header}")


def _areas_of(request: FetchRequest, reader: BankReader | OnceReader) -> Views:
    segment = reader.segment
    if request.part is Part.ONCE:
        return [(Area.ONCE, segment.once_view()[: segment.once_len])]
    assert isinstance(reader, BankReader)
    if request.part is Part.UNIQUE:
        blob = segment.blob_view(reader.bank)[: reader.info.blob_len]
        return [(Area.BLOB, blob), (Area.UNIQUE, segment.unique_view(reader.bank))]
    whole = segment.replicated_view(reader.bank)
    start = request.offset_bytes
    end = len(whole) if request.length_bytes is None else start + request.length_bytes
    if not 0 <= start <= end <= len(whole):
        raise PeerRefused(f"range {start}..{end} of a replicated area of {len(whole)} bytes")
    return [(Area.REPLICATED, whole[start:end])]
