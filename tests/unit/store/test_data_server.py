"""The rules of a holder, without any transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deadpool.core.types import Name
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.in_process import InProcessNetwork, InProcessTransport
from deadpool.store.segment import Segment, SegmentLayout
from deadpool.store.transport import PeerRefused, StreamHeader

LAYOUT = SegmentLayout(once_bytes=0, blob_capacity=100, unique_bytes=10, replicated_bytes=0)


def name(step: int) -> Name:
    return Name(step=step, generation=0)


def header(step: int, *, generation: int = 0, keep: Name | None = None) -> StreamHeader:
    return StreamHeader(
        rank=0,
        name=name(step),
        generation=generation,
        keep=keep,
        layout=LAYOUT,
        blob_len=0,
        once_len=0,
        once_checksum=0,
    )


def ignore() -> None:
    """Nothing to wake."""


class InterruptedStore(HostMemoryStore):
    """A newer generation is acked while a segment is being made, which takes seconds for a large one."""

    server: DataServer

    def create_held(self, rank: int, layout: SegmentLayout) -> Segment:
        segment = super().create_held(rank, layout)
        self.server.set_generation(2)
        return segment


@pytest.fixture
def store() -> Iterator[HostMemoryStore]:
    made = InterruptedStore("h", prefault=False)
    yield made
    made.close()


def make_server(store: HostMemoryStore) -> DataServer:
    return DataServer(store, InProcessTransport(InProcessNetwork()), choose_bank=lambda *_: 0)


def test_a_generation_acked_while_the_segment_is_made_fences_the_stream(store: InterruptedStore) -> None:
    store.server = make_server(store)
    with pytest.raises(PeerRefused, match="generation 1 is over, this host acked 2"):
        store.server.open_sink(header(1, generation=1), ignore)
    assert not store.leases


def test_generations_only_grow_and_the_rollback_name_may_come_later() -> None:
    store = HostMemoryStore("h", prefault=False)
    seen: list[Name | None] = []

    def choose(banks: object, incoming: object, keep: object, rollback: Name | None) -> int:
        seen.append(rollback)
        return 0

    server = DataServer(store, InProcessTransport(InProcessNetwork()), choose_bank=choose)
    server.set_generation(3)
    server.set_generation(3, name(7))
    server.set_generation(3)
    server.set_generation(2, name(1))
    opened = server.open_sink(header(8, generation=3), ignore)
    assert opened is not None
    with opened:
        pass
    server.set_generation(4)
    opened = server.open_sink(header(9, generation=4), ignore)
    assert opened is not None
    with opened:
        pass
    assert seen == [name(7), None]
    store.close()
