"""Hosts for the tests of the store: real stores and servers over either transport, and a gate in a stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from deadpool.core.commit import choose_holder_bank
from deadpool.core.types import Name
from deadpool.store.data_server import BankChoice, DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.replication import Replicator
from deadpool.store.segment import Segment, SegmentLayout
from deadpool.store.transport import (
    Address,
    Area,
    CopyInfo,
    FetchRequest,
    Sink,
    Source,
    StreamHeader,
    Transport,
    Views,
    timeout_for,
)

WAIT_S = 10.0
MIB = 1 << 20


def name(step: int, generation: int = 0) -> Name:
    return Name(step=step, generation=generation)


def layout(unique_bytes: int, *, once_bytes: int = 3000, replicated_bytes: int = 5000) -> SegmentLayout:
    return SegmentLayout(
        once_bytes=once_bytes,
        blob_capacity=4096,
        unique_bytes=unique_bytes,
        replicated_bytes=replicated_bytes,
    )


def fill(segment: Segment, bank: int, of: Name, *, blob: bytes = b"blob", pattern: int | None = None) -> None:
    """Capture `of` into a bank, as a worker does: every byte follows from its name."""
    value = (of.step * 31 + of.generation * 7 + 1) % 251 if pattern is None else pattern
    segment.begin(bank, of)
    segment.blob_view(bank)[: len(blob)] = blob
    unique = segment.unique_view(bank)
    unique[:] = _bytes_of(value, len(unique))
    replicated = segment.replicated_view(bank)
    replicated[:] = _bytes_of(value + 1, len(replicated))
    segment.complete(bank, blob_len=len(blob))


def _bytes_of(value: int, length: int) -> bytes:
    period = bytes((value + i) % 251 for i in range(251))
    return (period * (length // 251 + 1))[:length]


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for a state that nothing announces."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if is_true():
            return
        pause.wait(0.005)
    raise AssertionError(f"not within {WAIT_S} s: {what}")


class Gate:
    """Stops the first stream that reaches it, until it is opened."""

    def __init__(
        self, *, on_pass: Callable[[], None] = lambda: None, ungated_ranks: tuple[int, ...] = ()
    ) -> None:
        self.ungated_ranks = ungated_ranks
        self._reached = threading.Event()
        self._opened = threading.Event()
        self._on_pass = on_pass
        self.is_armed = True
        self.is_at_commit = False  # then it stands behind the commit instead of the first chunk

    def pass_through(self) -> None:
        self._on_pass()
        if self.is_armed:
            self._reached.set()
            assert self._opened.wait(WAIT_S), "the test never opened the gate"

    def await_stream(self) -> None:
        assert self._reached.wait(WAIT_S), "no stream came to the gate"

    def open(self) -> None:
        self.is_armed = False
        self._opened.set()


class GatedSink:
    """A sink with a gate behind its first chunk."""

    def __init__(self, sink: Sink, gate: Gate) -> None:
        self._sink = sink
        self._gate = gate

    @property
    def areas(self) -> Views:
        return self._sink.areas

    def check(self) -> None:
        self._sink.check()

    def chunk_received(self, area: Area, n_bytes: int, digest: int) -> None:
        self._sink.chunk_received(area, n_bytes, digest)
        if not self._gate.is_at_commit:
            self._gate.pass_through()

    def commit(self, checksum: int) -> None:
        self._sink.commit(checksum)
        if self._gate.is_at_commit:
            self._gate.pass_through()


class GatedSource:
    """A source with a gate behind its first bytes."""

    def __init__(self, source: Source, gate: Gate) -> None:
        self._source = source
        self._gate = gate

    @property
    def areas(self) -> Views:
        return self._source.areas

    def check(self) -> None:
        self._source.check()

    def on_cancel(self, hook: Callable[[], None] | None) -> None:
        self._source.on_cancel(hook)

    def sent(self, n_bytes: int) -> None:
        self._source.sent(n_bytes)
        self._gate.pass_through()

    def chunk_sent(self, area: Area, digest: int) -> None:
        self._source.chunk_sent(area, digest)

    def finish(self) -> int:
        return self._source.finish()


class GatedEndpoint:
    """An endpoint whose streams and fetches stop at a gate after one chunk."""

    def __init__(self, endpoint: DataServer, gate: Gate) -> None:
        self._endpoint = endpoint
        self._gate = gate

    def open_sink(
        self, header: StreamHeader, cancel: Callable[[], None]
    ) -> AbstractContextManager[Sink] | None:
        opened = self._endpoint.open_sink(header, cancel)
        if opened is None or header.rank in self._gate.ungated_ranks:
            return opened
        return self._with_gate(opened)

    @contextmanager
    def _with_gate(self, opened: AbstractContextManager[Sink]) -> Iterator[Sink]:
        with opened as sink:
            yield GatedSink(sink, self._gate)

    def open_source(self, request: FetchRequest) -> tuple[CopyInfo, AbstractContextManager[Source]]:
        info, opened = self._endpoint.open_source(request)
        return info, self._with_gated_source(opened)

    @contextmanager
    def _with_gated_source(self, opened: AbstractContextManager[Source]) -> Iterator[Source]:
        with opened as source:
            yield GatedSource(source, self._gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a push ended."""

    rank: int
    name: Name
    failure: str | None


@dataclass(slots=True, kw_only=True)
class Host:
    """One host: its store, its server, its replicator."""

    store: HostMemoryStore
    transport: Transport
    server: DataServer
    replicator: Replicator
    address: Address
    outcomes: queue.Queue[Outcome] = field(default_factory=queue.Queue)

    def make_own(self, rank: int, sizes: SegmentLayout, once: bytes = b"once" * 500) -> Segment:
        segment = self.store.create_own(rank, sizes)
        if sizes.once_bytes:
            segment.write_once(once)
        return segment

    def await_outcome(self) -> Outcome:
        return self.outcomes.get(timeout=WAIT_S)

    def await_held(self) -> Name:
        outcome = self.await_outcome()
        assert outcome.failure is None, outcome.failure
        return outcome.name

    def await_failure(self) -> str:
        outcome = self.await_outcome()
        assert outcome.failure is not None, f"{outcome.name} was held"
        return outcome.failure

    def held_names(self, rank: int = 0) -> tuple[Name, ...]:
        for copies in self.store.inventory().copies:
            if copies.rank == rank:
                return copies.held
        return ()


class Hosts:
    """A few hosts that know one another's addresses."""

    def __init__(
        self, make_transport: Callable[[], Transport], *, on_outcome: Callable[[], None] = lambda: None
    ) -> None:
        self._make_transport = make_transport
        self._on_outcome = on_outcome
        self.on_lookup: Callable[[], object] = lambda: None  # called when a push looks up its holder
        self._hosts: dict[str, Host] = {}
        self._gates: list[Gate] = []

    def add(
        self,
        member: str,
        *,
        gate: Gate | None = None,
        accept_limit_bytes: int | None = None,
        choose_bank: BankChoice = choose_holder_bank,
        timeout_s: Callable[[int], float] = timeout_for,
    ) -> Host:
        """Start a host in generation 0, resumed from snapshot 0."""
        outcomes: queue.Queue[Outcome] = queue.Queue()

        def note(outcome: Outcome) -> None:
            self._on_outcome()
            outcomes.put(outcome)

        store = HostMemoryStore(member, accept_limit_bytes=accept_limit_bytes, prefault=False)
        transport = self._make_transport()
        server = DataServer(store, transport, choose_bank=choose_bank)
        server.set_generation(0, name(0))
        if gate is None:
            address = server.start()
        else:
            self._gates.append(gate)
            address = transport.serve(GatedEndpoint(server, gate))
        replicator = Replicator(
            store,
            transport,
            address_of=self.address_of,
            on_held=lambda rank, of: note(Outcome(rank=rank, name=of, failure=None)),
            on_failed=lambda rank, of, why: note(Outcome(rank=rank, name=of, failure=why)),
            timeout_s=timeout_s,
        )
        replicator.start()
        host = Host(
            store=store,
            transport=transport,
            server=server,
            replicator=replicator,
            address=address,
            outcomes=outcomes,
        )
        self._hosts[member] = host
        return host

    def address_of(self, member: str) -> Address | None:
        self.on_lookup()
        host = self._hosts.get(member)
        return host.address if host else None

    def close(self) -> None:
        for gate in self._gates:
            gate.open()
        for host in self._hosts.values():
            host.replicator.close()
        for host in self._hosts.values():
            host.transport.close()
        for host in self._hosts.values():
            host.store.close()
