"""Framed messages over sockets: u32 big-endian length, then msgpack. Descriptors may ride along.

One reader thread a channel; sending is guarded by a lock, so that any thread may send.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20  # a constructor record is the largest message; measured: 264 KB (ZeRO-3)
CONTROL_FRAME_BYTES = 4 << 20  # control messages from the network are small

_SHORTEST_WAIT_S = 0.001  # zero would mean not to wait at all, which is another error

T = TypeVar("T")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel(Generic[T]):
    """Typed messages over one connected stream socket.

    Args:
        sock: connected socket; the channel owns it.
        incoming: msgspec type (a tagged union) of what may arrive.
        max_frame_bytes: a longer frame closes the channel.
    """

    def __init__(self, sock: socket.socket, incoming: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()
        self._max_frame_bytes = max_frame_bytes
        self._fds: list[int] = []

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send one message whole. Raises ChannelClosed."""
        body = self._encoder.encode(message)
        frame = _LENGTH.pack(len(body)) + body
        try:
            with self._send_lock:
                if fds:
                    sent = socket.send_fds(self._sock, [frame], list(fds))
                    self._sock.sendall(frame[sent:])
                else:
                    self._sock.sendall(frame)
        except OSError as error:
            raise ChannelClosed(f"peer is gone: {error}") from error

    def receive(self) -> T:
        """Block for the next message. Raises ChannelClosed at the end, msgspec.DecodeError on garbage."""
        return self._receive(self._max_frame_bytes, None)

    def receive_first(self, max_frame_bytes: int, timeout_s: float) -> T:
        """The first message of somebody unknown: short, and all of it in time. Afterwards nothing is limited.

        Raises:
            ChannelClosed: it was longer, came late, or did not come at all.
            msgspec.DecodeError: it is no message.
        """
        message = self._receive(max_frame_bytes, time.monotonic() + timeout_s)
        self._sock.settimeout(None)
        return message

    def _receive(self, max_frame_bytes: int, deadline_s: float | None) -> T:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline_s))
        if length > max_frame_bytes:
            raise ChannelClosed(f"frame of {length} bytes is longer than {max_frame_bytes}")
        body = self._read(length, deadline_s)
        try:
            return self._decoder.decode(body)
        except RecursionError as error:
            raise msgspec.DecodeError("a message is nested too deeply") from error

    def take_fd(self) -> int:
        """The oldest descriptor received and not yet taken."""
        return self._fds.pop(0)

    def close(self) -> None:
        """Wake the reader and close. Safe to call twice."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already closed by the peer
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def _read(self, length: int, deadline_s: float | None) -> bytes:
        parts: list[bytes] = []
        while length:
            try:
                if deadline_s is not None:
                    self._sock.settimeout(max(_SHORTEST_WAIT_S, deadline_s - time.monotonic()))
                if self._sock.family == socket.AF_UNIX:
                    data, fds, _, _ = socket.recv_fds(self._sock, min(length, 1 << 20), 4)
                    self._fds += fds
                else:
                    data = self._sock.recv(min(length, 1 << 20))
            except OSError as error:
                raise ChannelClosed(f"peer is gone: {error}") from error
            if not data:
                raise ChannelClosed("peer closed the connection")
            parts.append(data)
            length -= len(data)
        return b"".join(parts)


class ReaderThread:
    """Reads a channel until it ends, handing each message to `deliver`, then calls `ended` once."""

    def __init__(
        self, channel: Channel[T], deliver: Callable[[T], None], ended: Callable[[str], None], name: str
    ) -> None:
        self._channel = channel
        self._deliver = deliver
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        why = "closed"
        try:
            while True:
                self._deliver(self._channel.receive())
        except (ChannelClosed, msgspec.DecodeError) as error:
            why = str(error)
        finally:
            self._ended(why)
