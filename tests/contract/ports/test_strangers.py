"""One suite for every port that an agent listens on: what strangers send costs their connection, no more.

Control and heartbeats share a port, so there are three: control, data and rendezvous.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import ModuleType

import pytest

from deadpool.communicator import rendezvous_server
from deadpool.communicator.rendezvous_server import RendezvousServer
from deadpool.communicator.rendezvous_wire import Op, Request, Status, encode_frame, read_reply
from deadpool.ports import HELLO_FRAME_BYTES
from deadpool.runtime import control
from deadpool.runtime.messages import StatusReply, StatusRequest
from deadpool.store import tcp, wire
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.tcp import TcpTransport
from deadpool.store.transport import Lane
from tests.unit.runtime.planes import Plane, dial
from tests.unit.runtime.support import TOKEN, wait_until

WAIT_S = 10.0
LINES_A_MINUTE = 10


class Port(ABC):
    """One listening port under test."""

    module: ModuleType  # whose limits a test may shorten
    address: tuple[str, int]
    greeting: bytes  # with the right token

    @abstractmethod
    def serves(self) -> bool:
        """Whether somebody of the job is answered."""

    @abstractmethod
    def close(self) -> None: ...

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=WAIT_S)


class ControlPort(Port):
    module = control

    def __init__(self) -> None:
        self.plane = Plane("a")
        self.address = ("127.0.0.1", self.plane.member.control_port)
        self.greeting = struct.pack(">I", 60) + b"\x85" + b"x" * 59  # of which half is sent

    def serves(self) -> bool:
        with dial(self.address[1]) as (_, channel):
            channel.send(StatusRequest(token=TOKEN))
            return isinstance(channel.receive(), StatusReply)

    def close(self) -> None:
        self.plane.control.close()


class DataPort(Port):
    module = tcp

    def __init__(self) -> None:
        self._store = HostMemoryStore("holder", prefault=False)
        self._transport = TcpTransport(TOKEN)
        self.address = DataServer(self._store, self._transport).start()
        self.greeting = wire.encode_hello(TOKEN, wire.Kind.FETCH, Lane.SMALL)

    def serves(self) -> bool:
        """A greeted peer is heard: its broken request is answered by the end of the connection alone."""
        with self.connect() as known:
            known.sendall(self.greeting)
            known.settimeout(0.2)
            try:
                return known.recv(1) != b""
            except TimeoutError:
                return True  # waits for the request

    def close(self) -> None:
        self._transport.close()
        self._store.close()


class RendezvousPort(Port):
    module = rendezvous_server

    def __init__(self) -> None:
        self._server = RendezvousServer("127.0.0.1", TOKEN)
        self.address = ("127.0.0.1", self._server.start())
        self.greeting = encode_frame(Request(op=Op.HELLO, generation=1, keys=[TOKEN]))

    def serves(self) -> bool:
        with self.connect() as known:
            known.sendall(self.greeting)
            return read_reply(known).status is Status.OK

    def close(self) -> None:
        self._server.close()


@pytest.fixture(params=[ControlPort, DataPort, RendezvousPort], ids=["control", "data", "rendezvous"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    with closing(request.param()) as made:
        yield made


def is_closed_within(sock: socket.socket, seconds: float) -> bool:
    """Whether the other side ends the connection in time, without a byte of an answer."""
    sock.settimeout(seconds)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def is_closed_after(sock: socket.socket, sent: bytes) -> bool:
    """Whether the other side has ended the connection a moment after something was sent."""
    try:
        sock.sendall(sent)
    except ConnectionError:
        return True
    return is_closed_within(sock, 0.2)


@pytest.mark.parametrize(
    "content",
    [os.urandom(1 << 16), b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64, b"\0" * 512],
    ids=["noise", "a web client", "zeros"],
)
def test_bytes_of_strangers_cost_their_connection_and_one_line(
    port: Port, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with port.connect() as stranger:
        with contextlib.suppress(ConnectionError):  # hung up on before it had sent all
            stranger.sendall(content)
        assert is_closed_within(stranger, WAIT_S)
    assert port.serves()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1, lines
    assert "port: closed a connection of 127.0.0.1:" in lines[0]


@pytest.mark.parametrize("announced", [HELLO_FRAME_BYTES + 1, 1 << 24, (1 << 32) - 1])
@pytest.mark.parametrize("port", [ControlPort, RendezvousPort], ids=["control", "rendezvous"], indirect=True)
def test_a_huge_length_is_not_waited_for(port: Port, announced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data port reads no length from a stranger: its frames have fixed sizes."""
    monkeypatch.setattr(port.module, "HELLO_TIMEOUT_S", 3 * WAIT_S)
    with port.connect() as stranger:
        stranger.sendall(struct.pack(">I", announced))
        assert is_closed_within(stranger, WAIT_S)
    assert port.serves()


def test_half_a_greeting_and_then_silence_ends_in_time(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port.module, "HELLO_TIMEOUT_S", 0.3)
    with port.connect() as stranger:
        stranger.sendall(port.greeting[: len(port.greeting) // 2])
        assert is_closed_within(stranger, WAIT_S)
    assert port.serves()


def test_a_greeting_byte_by_byte_has_no_more_time_than_one_at_once(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port.module, "HELLO_TIMEOUT_S", 0.5)
    with port.connect() as stranger:
        assert any(is_closed_after(stranger, bytes([byte])) for byte in port.greeting[:30])
    assert port.serves()


def test_a_crowd_that_says_nothing_is_bounded_and_passes(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = "MAX_CONNECTIONS" if isinstance(port, DataPort) else "MAX_STRANGERS"
    monkeypatch.setattr(port.module, limit, 8)
    monkeypatch.setattr(port.module, "HELLO_TIMEOUT_S", 1.0)
    with ExitStack() as stack:
        crowd = [stack.enter_context(port.connect()) for _ in range(20)]
        wait_until(lambda: re.search("8 (connections|others)", caplog.text) is not None, "a full port")
        assert all(is_closed_within(each, WAIT_S) for each in crowd)
        assert port.serves()


def test_a_flood_writes_a_few_lines_and_says_how_many_there_were(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(60):
        with port.connect() as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"\xff" * 200)
            assert is_closed_within(stranger, WAIT_S)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == LINES_A_MINUTE
    assert port.serves()


def test_a_port_that_ran_out_of_descriptors_serves_again(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    with closing(socket.socket()) as waiting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(waiting.fileno()))
            waiting.settimeout(WAIT_S)
            waiting.connect(port.address)  # the kernel takes it in; the port cannot
            wait_until(lambda: "cannot accept" in caplog.text, "a failed accept")
        finally:
            for each in fillers:
                os.close(each)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert port.serves()
