"""The data port among strangers, silent peers and broken links."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from deadpool.core.types import Name
from deadpool.store import tcp, wire
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.replication import Replicator
from deadpool.store.segment import SegmentLayout
from deadpool.store.tcp import TcpTransport
from deadpool.store.transport import Address, Lane, StreamHeader

WAIT_S = 10.0
TOKEN = "token of the job"
LAYOUT = SegmentLayout(once_bytes=0, blob_capacity=100, unique_bytes=3 << 20, replicated_bytes=0)
FIRST = Name(step=0, generation=0)
HEADER = StreamHeader(
    rank=0, name=FIRST, generation=0, keep=None, layout=LAYOUT, blob_len=0, once_len=0, once_checksum=0
)


class Holder:
    def __init__(self) -> None:
        self.store = HostMemoryStore("holder", prefault=False)
        self.transport = TcpTransport(TOKEN)
        self.server = DataServer(self.store, self.transport)
        self.server.set_generation(0, FIRST)
        self.address = self.server.start()

    def close(self) -> None:
        self.transport.close()
        self.store.close()


class Owner:
    """Pushes snapshot 0 of rank 0 to an address."""

    def __init__(self, address: Address, *, timeout_s: float = WAIT_S) -> None:
        self.address = address
        self.outcomes: queue.Queue[str] = queue.Queue()
        self.store = HostMemoryStore("owner", prefault=False)
        self.transport = TcpTransport(TOKEN)
        self.replicator = Replicator(
            self.store,
            self.transport,
            address_of=lambda _: self.address,
            on_held=lambda *_: self.outcomes.put("held"),
            on_failed=lambda rank, name, why: self.outcomes.put(why),
            timeout_s=lambda _: timeout_s,
        )
        self.replicator.start()
        self.segment = self.store.create_own(0, LAYOUT)
        self.segment.begin(0, FIRST)
        self.segment.unique_view(0)[:] = os.urandom(LAYOUT.unique_bytes)
        self.segment.complete(0, blob_len=0)

    def start_push(self) -> None:
        self.replicator.push_captured(0, FIRST, 0, "holder", None)

    def push(self) -> str:
        """Push and wait for the outcome: held, or why not."""
        self.start_push()
        return self.outcomes.get(timeout=WAIT_S)

    def close(self) -> None:
        self.replicator.close()
        self.transport.close()
        self.store.close()


class Relay:
    """Stands between owner and holder: can flip a bit at an offset of the stream, or cut it there."""

    def __init__(self, target: Address, *, flip_at: int | None = None, cut_at: int | None = None) -> None:
        self._target = target
        self._flip_at = flip_at
        self._cut_at = cut_at
        self.n_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.n_connections += 1
                with client, socket.create_connection(self._target) as upstream:
                    back = threading.Thread(target=_pump, args=(upstream, client, bytes))
                    back.start()
                    _pump(client, upstream, self._damage(0))
                    back.join()

    def _damage(self, seen: int) -> Callable[[bytes], bytes]:
        def damage(piece: bytes) -> bytes:
            nonlocal seen
            changed = bytearray(piece)
            if self._flip_at is not None and seen <= self._flip_at < seen + len(piece):
                changed[self._flip_at - seen] ^= 1
                self._flip_at = None
            seen += len(piece)
            if self._cut_at is not None and seen > self._cut_at:
                self._cut_at = None
                raise ConnectionError("cut by the test")
            return bytes(changed)

        return damage

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _pump(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Pass bytes on until either side closes, then close both."""
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(change(piece))
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.close()


def await_closed(client: socket.socket) -> None:
    """The other side closes within the time that a frame may take."""
    client.settimeout(WAIT_S)
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass
    client.close()


GOOD_HELLO = wire.encode_hello(TOKEN, wire.Kind.PUSH, Lane.SMALL)
HOSTILE = {
    "a web client": b"GET / HTTP/1.1\r\nHost: holder\r\n\r\n" + b"x" * 100,
    "noise": os.urandom(4096),
    "a token of another job": wire.encode_hello("wrong", wire.Kind.PUSH, Lane.SMALL),
    "an unknown kind": GOOD_HELLO[:10] + b"\x09" + GOOD_HELLO[11:],
    "noise after a good hello": GOOD_HELLO + os.urandom(1000),
    "a header with a flipped bit": GOOD_HELLO + bytes([2]) + wire.encode_stream(HEADER)[1:],
    "a chunk that was not announced": GOOD_HELLO
    + wire.encode_stream(HEADER)
    + os.urandom(wire.CHUNK_HEADER_BYTES),
    "a fetch of noise": wire.encode_hello(TOKEN, wire.Kind.FETCH, Lane.SMALL)
    + os.urandom(wire.REQUEST_BYTES),
}


def test_hostile_bytes_cost_one_line_each_and_nothing_else(
    holder: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    for what, content in HOSTILE.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "deadpool.store.tcp"):
            client = socket.create_connection(holder.address)
            client.sendall(content)
            await_closed(client)
            lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1, (what, lines)
        assert "closed" in lines[0]

    assert holder.server.metrics.as_dict()["streams_completed"] == 0
    with closing(Owner(holder.address)) as owner:
        assert owner.push() == "held"


def test_a_peer_that_stops_in_the_middle_of_a_frame_is_closed(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HELLO_TIMEOUT_S", 0.3)
    client = socket.create_connection(holder.address)
    client.sendall(GOOD_HELLO[:7])
    start_s = time.monotonic()
    await_closed(client)
    assert time.monotonic() - start_s < 3.0


def test_many_idle_strangers_do_not_keep_the_port_from_serving(holder: Holder) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(holder.address))
        assert stack.enter_context(closing(Owner(holder.address))).push() == "held"


def test_a_bit_flipped_on_the_wire_is_found_and_the_copy_sent_again(holder: Holder) -> None:
    with (
        closing(Relay(holder.address, flip_at=2_000_000)) as relay,
        closing(Owner(relay.address)) as owner,
    ):
        assert owner.push() == "held"
        held = holder.store.held(0)
        assert held is not None
        bank = held.bank_of(FIRST)
        assert bank is not None
        assert held.unique_view(bank) == owner.segment.unique_view(0)
        assert holder.server.metrics.as_dict()["streams_failed"] == 1


def test_a_connection_cut_in_mid_stream_is_made_again_once(holder: Holder) -> None:
    with (
        closing(Relay(holder.address, cut_at=1_500_000)) as relay,
        closing(Owner(relay.address)) as owner,
    ):
        assert owner.push() == "held"
        assert relay.n_connections == 2
        counts = owner.replicator.metrics.as_dict()
        assert (counts["streams_completed"], counts["streams_failed"]) == (1, 0)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A stopped host: the kernel accepts and buffers, nobody answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield listener
    listener.close()


def test_a_silent_holder_fails_after_two_attempts_within_their_deadlines(silent: socket.socket) -> None:
    with closing(Owner(silent.getsockname(), timeout_s=0.3)) as owner:
        start_s = time.monotonic()
        assert "not done within 0.3 s" in owner.push()
        assert 0.6 <= time.monotonic() - start_s < 3.0
        assert owner.replicator.metrics.as_dict()["streams_failed"] == 1


def test_a_newer_generation_frees_a_lane_from_a_silent_holder(silent: socket.socket) -> None:
    with closing(Owner(silent.getsockname(), timeout_s=60.0)) as owner:
        owner.start_push()
        with silent.accept()[0]:
            start_s = time.monotonic()
            owner.replicator.set_generation(1)

            assert time.monotonic() - start_s < 2.0
            assert not owner.store.leases
            assert owner.outcomes.empty()


def test_an_answer_that_comes_after_the_generation_changed_counts_for_nothing(silent: socket.socket) -> None:
    with closing(Owner(silent.getsockname(), timeout_s=60.0)) as owner:
        owner.start_push()
        with silent.accept()[0] as connection:
            connection.sendall(wire.encode_reply(wire.Code.ACCEPT))
            received = 0
            while received < LAYOUT.unique_bytes:
                received += len(connection.recv(1 << 16))

            owner.replicator.set_generation(1)
            with contextlib.suppress(OSError):
                connection.sendall(wire.encode_reply(wire.Code.HELD))
            owner.replicator.close()
            assert owner.outcomes.empty()


def test_an_idle_connection_that_broke_costs_no_attempt(holder: Holder) -> None:
    with closing(Relay(holder.address)) as relay, closing(Owner(relay.address)) as owner:
        assert owner.push() == "held"
        for connection in list(holder.transport._open):
            connection.shut_down()

        assert owner.push() == "held"
        assert relay.n_connections == 2


def test_no_connection_to_a_holder_that_is_gone_stays_open(holder: Holder) -> None:
    """Each holder of a long job has a port of its own: nobody asks for the old ones again."""
    first = Holder()
    with closing(Owner(first.address)) as owner:
        assert owner.push() == "held"
        first.close()
        owner.address = holder.address

        assert owner.push() == "held"
        assert len(owner.transport._open) == 1


def test_nothing_is_left_after_close_whatever_was_connected() -> None:
    """The leak check of every test sees threads, sockets and memory files."""
    made = Holder()
    with socket.create_connection(made.address), socket.create_connection(made.address) as greeted:
        greeted.sendall(GOOD_HELLO)
        with closing(Owner(made.address)) as owner:
            assert owner.push() == "held"
            start_s = time.monotonic()
            made.close()
            assert time.monotonic() - start_s < 3.0


def test_a_closed_transport_starts_nothing(holder: Holder) -> None:
    with closing(Owner(holder.address)) as owner:
        owner.transport.close()
        assert "closed" in owner.push()
