"""Frames of the rendezvous protocol: a big-endian u32 length, then a msgpack array. No torch here.

A connection says hello once, then sends one request at a time and reads its one reply. Every request carries
the generation it belongs to; a server that has moved on refuses older ones.
"""

from __future__ import annotations

import socket
import struct
from enum import Enum

import msgspec

MAX_FRAME_BYTES = 1 << 24
"""Largest frame either side accepts. Bootstrap values are a few hundred bytes per peer."""

_LENGTH = struct.Struct(">I")


class Op(Enum):
    """What a request asks for."""

    HELLO = "hello"  # keys: [token]
    SET = "set"  # keys and values pairwise
    GET = "get"  # waits for all keys, then their values
    WAIT = "wait"
    CHECK = "check"  # number: 1 if all exist
    ADD = "add"  # number is added; number back
    APPEND = "append"
    COMPARE_SET = "compare_set"  # values: expected, desired; value back
    DELETE = "delete"  # number: how many existed
    COUNT = "count"  # number of keys


class Status(Enum):
    """How a request ended."""

    OK = "ok"
    TIMEOUT = "timeout"  # missing keys are listed in `keys`
    STALE = "stale"  # the server serves a newer generation: `number`
    REFUSED = "refused"  # wrong token or malformed


class Request(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One request."""

    op: Op
    generation: int
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0
    timeout_s: float = 0.0


class Reply(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The reply to one request."""

    status: Status
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode_frame(message: Request | Reply) -> bytes:
    """Encode `message` with its length in front."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_bytes(buffer: bytearray, limit_bytes: int = MAX_FRAME_BYTES) -> int | None:
    """Length of the body of the frame that begins `buffer`; None while the length itself is incomplete.

    Raises:
        ValueError: the frame is larger than the limit.
    """
    if len(buffer) < _LENGTH.size:
        return None
    length: int = _LENGTH.unpack_from(buffer)[0]
    if length > limit_bytes:
        raise ValueError(f"a frame of {length} bytes is larger than {limit_bytes}")
    return length


def take_requests(buffer: bytearray, limit_bytes: int = MAX_FRAME_BYTES) -> list[Request]:
    """Remove all complete requests from the front of `buffer`.

    Args:
        buffer: what has been received and not been taken.
        limit_bytes: the largest frame that is accepted now.

    Raises:
        ValueError: the bytes are no requests (msgspec's errors are ValueErrors).
    """
    found = []
    while (length := frame_bytes(buffer, limit_bytes)) is not None and len(buffer) >= _LENGTH.size + length:
        found.append(_requests.decode(bytes(buffer[_LENGTH.size : _LENGTH.size + length])))
        del buffer[: _LENGTH.size + length]
    return found


def read_reply(connection: socket.socket) -> Reply:
    """Read one reply, within the socket's own timeout.

    Raises:
        ConnectionError: the server or a close ended the connection.
        TimeoutError: nothing arrived in time.
    """
    buffer = bytearray()
    while True:
        length = frame_bytes(buffer)
        wanted = (_LENGTH.size if length is None else _LENGTH.size + length) - len(buffer)
        if wanted <= 0:
            return _replies.decode(bytes(buffer[_LENGTH.size :]))
        chunk = connection.recv(wanted)
        if not chunk:
            raise ConnectionError("the connection was closed")
        buffer += chunk
