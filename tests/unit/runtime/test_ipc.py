"""Frames over a connected socket: whole messages, descriptors, and what ends a channel."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from deadpool.core.types import Name
from deadpool.runtime.ipc import Channel, ChannelClosed, ReaderThread
from deadpool.runtime.messages import (
    AgentToWorker,
    Attach,
    Captured,
    Control,
    Finish,
    Hello,
    Run,
    SegmentReply,
    WorkerToAgent,
)
from tests.unit.runtime.support import WAIT_S, pattern

MAX_BYTES = 1 << 20
CHANGED = b"changed through the descriptor"


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    one.settimeout(WAIT_S)
    other.settimeout(WAIT_S)
    with one, other:
        yield one, other


@pytest.fixture
def agent(sockets: tuple[socket.socket, socket.socket]) -> Iterator[Channel[WorkerToAgent]]:
    channel: Channel[WorkerToAgent] = Channel(sockets[0], WorkerToAgent, MAX_BYTES)
    yield channel
    channel.close()


@pytest.fixture
def worker(sockets: tuple[socket.socket, socket.socket]) -> Iterator[Channel[AgentToWorker]]:
    channel: Channel[AgentToWorker] = Channel(sockets[1], AgentToWorker, MAX_BYTES)
    yield channel
    channel.close()


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def test_messages_arrive_whole_and_in_order_in_both_directions(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    agent.send(Run(generation=3))
    agent.send(Finish(generation=4))
    captured = Captured(name=Name(step=7, generation=3), bank=1, blob_len=12)
    worker.send(captured)
    assert worker.receive() == Run(generation=3)
    assert worker.receive() == Finish(generation=4)
    assert agent.receive() == captured


def test_a_message_longer_than_any_socket_buffer_arrives_whole(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    message = Attach(generation=1, once=pattern(MAX_BYTES - 100, "once"))
    sender = threading.Thread(target=worker.send, args=(message,))
    sender.start()
    assert agent.receive() == message
    sender.join(WAIT_S)


def test_a_message_cut_into_single_bytes_arrives_whole(
    sockets: tuple[socket.socket, socket.socket], agent: Channel[WorkerToAgent]
) -> None:
    message = Captured(name=Name(step=7, generation=3), bank=1, blob_len=12)
    for byte in _frame(msgspec.msgpack.encode(message)):
        sockets[1].sendall(bytes([byte]))
    assert agent.receive() == message


def test_a_descriptor_travels_with_its_message_and_shares_the_memory(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    mine = _memory_file(b"segment")
    try:
        agent.send(SegmentReply(generation=1), (mine,))
        assert worker.receive() == SegmentReply(generation=1)
        theirs = worker.take_fd()
        assert os.pread(theirs, 100, 0) == b"segment"
        os.pwrite(theirs, CHANGED, 0)
        assert os.pread(mine, 100, 0) == CHANGED
        os.close(theirs)
    finally:
        os.close(mine)


def test_descriptors_are_taken_in_the_order_of_their_messages(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    for content in (b"first", b"second"):
        fd = _memory_file(content)
        agent.send(SegmentReply(generation=1), (fd,))
        os.close(fd)
    worker.receive()
    worker.receive()
    taken = [worker.take_fd(), worker.take_fd()]
    assert [os.pread(fd, 100, 0) for fd in taken] == [b"first", b"second"]
    for fd in taken:
        os.close(fd)


def test_a_descriptor_that_nobody_took_is_closed_with_the_channel(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    fd = _memory_file(b"left")
    agent.send(SegmentReply(generation=1), (fd,))
    os.close(fd)
    worker.receive()
    received = max(int(name) for name in os.listdir("/proc/self/fd") if _is_memory_file(name))
    worker.close()
    assert not _is_open(received)


def _is_memory_file(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:test")
    except OSError:
        return False


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"no msgpack at all",
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        msgspec.msgpack.encode({"type": "Run", "generation": "one"}),
        msgspec.msgpack.encode({"type": "Run"}),
        msgspec.msgpack.encode(Hello(member="a", token="t", generation=1)),  # for another kind of channel
    ],
)
def test_garbage_is_a_decode_error_and_the_next_message_is_read(
    sockets: tuple[socket.socket, socket.socket], worker: Channel[AgentToWorker], body: bytes
) -> None:
    sockets[0].sendall(_frame(body) + _frame(msgspec.msgpack.encode(Run(generation=2))))
    with pytest.raises(msgspec.DecodeError):
        worker.receive()
    assert worker.receive() == Run(generation=2)


def test_garbage_that_is_nested_deeply_is_a_decode_error_too(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    body = b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 100_000
    channel: Channel[Control] = Channel(sockets[0], Control, MAX_BYTES)
    sender = threading.Thread(target=sockets[1].sendall, args=(_frame(body),))
    sender.start()
    try:
        with pytest.raises((msgspec.DecodeError, ChannelClosed)):
            channel.receive()
    finally:
        channel.close()
        sender.join(WAIT_S)


def test_a_frame_that_announces_too_much_ends_the_channel_before_its_bytes_come(
    sockets: tuple[socket.socket, socket.socket], worker: Channel[AgentToWorker]
) -> None:
    sockets[0].sendall(struct.pack(">I", MAX_BYTES + 1))
    with pytest.raises(ChannelClosed, match=f"{MAX_BYTES + 1} bytes"):
        worker.receive()


def test_a_peer_that_closes_between_messages_or_within_one_is_told_apart_from_a_message(
    sockets: tuple[socket.socket, socket.socket], worker: Channel[AgentToWorker]
) -> None:
    sockets[0].sendall(_frame(msgspec.msgpack.encode(Run(generation=2)))[:-1])
    sockets[0].close()
    with pytest.raises(ChannelClosed):
        worker.receive()
    with pytest.raises(ChannelClosed):
        worker.receive()


def test_sending_to_a_peer_that_is_gone_says_so(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    worker.close()
    with pytest.raises(ChannelClosed):
        agent.send(Run(generation=1))


def test_closing_twice_is_allowed_and_afterwards_nothing_is_sent(agent: Channel[WorkerToAgent]) -> None:
    agent.close()
    agent.close()
    with pytest.raises(ChannelClosed):
        agent.send(Run(generation=1))


def test_messages_of_concurrent_senders_never_mix(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    n_senders, n_each = 4, 50
    # Longer than a socket buffer, so that a send without a lock would be interrupted by another.
    payloads = [pattern(60_000 + sender, sender) for sender in range(n_senders)]

    def send(sender: int) -> None:
        for _ in range(n_each):
            worker.send(Attach(generation=sender, once=payloads[sender]))

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(n_senders)]
    for thread in senders:
        thread.start()
    counts = [0] * n_senders
    for _ in range(n_senders * n_each):
        message = agent.receive()
        assert isinstance(message, Attach)
        assert message.once == payloads[message.generation]
        counts[message.generation] += 1
    for thread in senders:
        thread.join(WAIT_S)
    assert counts == [n_each] * n_senders


class _Reading:
    """A reader thread, and what it said."""

    def __init__(self, channel: Channel[AgentToWorker]) -> None:
        self.messages: queue.Queue[AgentToWorker] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        self.thread = ReaderThread(channel, self.messages.put, self.ends.put, "test-reader")
        self.thread.start()


def test_a_reader_hands_over_messages_until_the_peer_is_gone_and_says_so_once(
    agent: Channel[WorkerToAgent], worker: Channel[AgentToWorker]
) -> None:
    reading = _Reading(worker)
    agent.send(Run(generation=1))
    agent.send(Run(generation=2))
    assert reading.messages.get(timeout=WAIT_S) == Run(generation=1)
    assert reading.messages.get(timeout=WAIT_S) == Run(generation=2)
    agent.close()
    assert "peer closed" in reading.ends.get(timeout=WAIT_S)
    reading.thread.join(WAIT_S)
    assert reading.ends.empty()


def test_closing_the_channel_wakes_its_own_reader(worker: Channel[AgentToWorker]) -> None:
    worker.settimeout(None)
    reading = _Reading(worker)
    worker.close()
    reading.ends.get(timeout=WAIT_S)
    reading.thread.join(WAIT_S)


def test_a_reader_ends_at_garbage_with_the_reason(
    sockets: tuple[socket.socket, socket.socket], worker: Channel[AgentToWorker]
) -> None:
    reading = _Reading(worker)
    sockets[0].sendall(_frame(b"\xc1"))
    assert "malformed" in reading.ends.get(timeout=WAIT_S)
    reading.thread.join(WAIT_S)
