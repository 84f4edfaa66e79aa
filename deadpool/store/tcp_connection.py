"""One TCP connection of the data plane: blocking calls that notice deadlines and stops.

[Note: deadlines and stops] Sockets block, with a kernel timeout of TICK_S per call; every tick and
every piece calls `check`, which raises when the deadline has passed or the stream is not wanted any
more. A stop also shuts the socket down, which wakes a blocked call at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Callable

from deadpool.errors import ReplicaCorrupt
from deadpool.store import wire
from deadpool.store.checksum import chunk_digest, iterate_chunks
from deadpool.store.transport import Address, Area, Deadline, Source, Views

TICK_S = 0.25
CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 20
FRAME_TIMEOUT_S = 5.0
"""A peer that has begun a frame finishes it within this; a connection says hello within this."""

Check = Callable[[], None]
_TIMEVAL = struct.Struct("@ll")


class Connection:
    """A connected socket. One thread uses it; any thread may shut it down."""

    def __init__(self, sock: socket.socket) -> None:
        tick = _TIMEVAL.pack(0, int(TICK_S * 1e6))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that lost its power never closes: without probes its idle connection would stay for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._socket = sock

    @classmethod
    def open(cls, address: Address, check: Check) -> Connection:
        """Connect. A stop or a deadline ends even the wait for a host that is gone."""
        deadline = Deadline(CONNECT_TIMEOUT_S, f"connection to {address}")
        family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(target)
            if code == errno.EINPROGRESS:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                while not poll.poll(TICK_S * 1000):
                    check()
                    deadline.check()
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            return cls(sock)
        except BaseException:
            sock.close()
            raise

    def send(
        self,
        frame: bytes,
        check: Check,
        payload: memoryview | None = None,
        sent: Callable[[int], None] | None = None,
    ) -> None:
        """Send a frame and what belongs to it; `sent` counts the payload's bytes as the socket takes them."""
        payload = memoryview(b"") if payload is None else payload
        head = memoryview(frame)
        done = 0
        while done < len(head) + len(payload):
            check()
            try:
                if done < len(head):
                    n_bytes = self._socket.sendmsg([head[done:], payload])
                else:
                    n_bytes = self._socket.send(payload[done - len(head) :])
            except BlockingIOError:  # a tick
                continue
            payload_before = max(0, done - len(head))
            done += n_bytes
            if sent is not None and done > len(head):
                sent(done - len(head) - payload_before)

    def receive_into(self, view: memoryview, check: Check) -> None:
        done = 0
        while done < len(view):
            check()
            try:
                n_bytes = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # a tick
                continue
            if n_bytes == 0:
                raise ConnectionError("the peer closed the connection")
            done += n_bytes

    def receive(self, n_bytes: int, check: Check) -> bytes:
        """Receive a frame of a size that this side knows."""
        frame = bytearray(n_bytes)
        self.receive_into(memoryview(frame), check)
        return bytes(frame)

    def receive_when_sent(self, n_bytes: int, check: Check) -> bytes | None:
        """Wait without limit for a frame to begin, then receive it; None if the peer closed instead."""
        first = bytearray(1)
        while True:
            check()
            try:
                if self._socket.recv_into(first) == 0:
                    return None
                break
            except BlockingIOError:  # a tick
                continue
        rest = Deadline(FRAME_TIMEOUT_S, "the rest of a frame")
        return bytes(first) + self.receive(n_bytes - 1, rest.check)

    def is_abandoned(self) -> bool:
        """The peer has closed it. To be asked while no frame is due: then nothing but an end can arrive."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def shut_down(self) -> None:
        """Wake whoever is blocked on it. Never blocks."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class StallWatch:
    """Deadline that moves with every sign of progress."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self.progress()

    def progress(self) -> None:
        self._deadline = Deadline(self._timeout_s, f"{self._what} stalled")

    def check(self) -> None:
        self._deadline.check()


def send_areas(connection: Connection, areas: Views, source: Source, check: Check) -> None:
    """Send every chunk of every area, each with its digest."""
    for area, view in areas:
        for offset, chunk in iterate_chunks(view):
            digest = chunk_digest(chunk)
            header = wire.encode_chunk(area, offset, len(chunk), digest)
            connection.send(header, check, chunk, source.sent)
            source.chunk_sent(area, digest)


def receive_areas(
    connection: Connection, areas: Views, check: Check, received: Callable[[Area, int, int], None]
) -> None:
    """Receive every chunk of every area in place; `received(area, bytes, digest)` follows each good one.

    Raises:
        ReplicaCorrupt: a chunk fails its checksum.
    """
    for area, view in areas:
        for offset, chunk in iterate_chunks(view):
            header = connection.receive(wire.CHUNK_HEADER_BYTES, check)
            digest = wire.decode_chunk(header, area, offset, len(chunk))
            connection.receive_into(chunk, check)
            if chunk_digest(chunk) != digest:
                raise ReplicaCorrupt(f"chunk at {offset} of the {area.name.lower()} area fails its checksum")
            received(area, len(chunk), digest)


def receive_reply(connection: Connection, check: Check) -> tuple[wire.Code, bool, str]:
    """Return (code, whether the holder needs the write-once area, reason)."""
    code, need_once, reason_bytes = wire.decode_reply(connection.receive(wire.REPLY_BYTES, check))
    reason = connection.receive(reason_bytes, check).decode(errors="replace") if reason_bytes else ""
    return code, need_once, reason
