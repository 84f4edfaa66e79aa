"""The in-process transport: one process plays all hosts. For tests and simulations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from deadpool.errors import ReplicaCorrupt
from deadpool.store.checksum import chunk_digest, iterate_chunks
from deadpool.store.transport import (
    Address,
    Area,
    CopyInfo,
    Deadline,
    Endpoint,
    FetchRequest,
    Lane,
    Source,
    StreamHeader,
    StreamStopped,
    Transport,
    TransportFailed,
    areas_to_send,
    match_views,
)


class InProcessNetwork:
    """Addresses of endpoints within one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: dict[Address, Endpoint] = {}
        self._next_port = 1

    def add(self, endpoint: Endpoint) -> Address:
        with self._lock:
            address = ("in-process", self._next_port)
            self._next_port += 1
            self._endpoints[address] = endpoint
            return address

    def remove(self, address: Address) -> None:
        with self._lock:
            self._endpoints.pop(address, None)

    def find(self, address: Address) -> Endpoint:
        with self._lock:
            endpoint = self._endpoints.get(address)
        if endpoint is None:
            raise TransportFailed(f"nobody serves {address}")
        return endpoint


class InProcessTransport(Transport):
    """Copies straight between mappings, with the checks of the real one."""

    def __init__(self, network: InProcessNetwork) -> None:
        self._network = network
        self._addresses: list[Address] = []

    def serve(self, endpoint: Endpoint) -> Address:
        address = self._network.add(endpoint)
        self._addresses.append(address)
        return address

    def push(
        self, address: Address, header: StreamHeader, source: Source, *, lane: Lane, timeout_s: float
    ) -> None:
        deadline = Deadline(timeout_s, f"push of rank {header.rank} to {address}")
        opened = self._network.find(address).open_sink(header, lambda: None)
        if opened is None:
            return
        with opened as sink:
            targets = dict(sink.areas)
            for area, view in areas_to_send(source.areas, need_once=Area.ONCE in targets):
                for offset, chunk in iterate_chunks(view):
                    deadline.check()
                    target = targets[area][offset : offset + len(chunk)]
                    digest = _copy_chunk(chunk, target, source)
                    with _said_by(address):
                        sink.check()
                        _verify_chunk(target, digest)
                        sink.chunk_received(area, len(chunk), digest)
                    source.chunk_sent(area, digest)
            checksum = source.finish()
            with _said_by(address):
                sink.commit(checksum)

    def fetch(
        self,
        address: Address,
        request: FetchRequest,
        place: Callable[[CopyInfo], Sequence[memoryview]],
        *,
        timeout_s: float,
    ) -> CopyInfo:
        deadline = Deadline(timeout_s, f"fetch of rank {request.rank} from {address}")
        info, opened = self._network.find(address).open_source(request)
        with opened as source:
            targets = dict(match_views(info, place(info)))
            for area, view in source.areas:
                for offset, chunk in iterate_chunks(view):
                    deadline.check()
                    target = targets[area][offset : offset + len(chunk)]
                    with _said_by(address):
                        digest = _copy_chunk(chunk, target, source)
                        source.chunk_sent(area, digest)
                    _verify_chunk(target, digest)
            with _said_by(address):
                source.finish()
        return info

    def close(self) -> None:
        for address in self._addresses:
            self._network.remove(address)
        self._addresses.clear()


def _copy_chunk(chunk: memoryview, target: memoryview, source: Source) -> int:
    digest = chunk_digest(chunk)
    source.check()
    target[:] = chunk
    source.sent(len(chunk))
    return digest


def _verify_chunk(chunk: memoryview, digest: int) -> None:
    if chunk_digest(chunk) != digest:
        raise ReplicaCorrupt("a chunk fails its checksum")


@contextmanager
def _said_by(address: Address) -> Iterator[None]:
    """What makes one side give up, the other sees as a broken connection."""
    try:
        yield
    except (ReplicaCorrupt, StreamStopped) as error:
        raise TransportFailed(f"{address} dropped the connection: {error}") from error
