"""Frames of the data port. Fixed sizes, little-endian, checked before anything is believed.

    client: HELLO                       once per connection
    push:   STREAM -> REPLY (ACCEPT) -> CHUNK + bytes ... -> END -> REPLY (HELD)      repeated
    fetch:  REQUEST -> REPLY (ACCEPT) + INFO -> CHUNK + bytes ... -> END              once

Nobody allocates by a number read from here without a bound.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum

from deadpool.core.types import Name
from deadpool.store.checksum import chunk_digest
from deadpool.store.segment import SegmentLayout
from deadpool.store.transport import Area, CopyInfo, FetchRequest, Lane, Part, StreamHeader, TransportFailed

VERSION = 1
MAX_REASON_BYTES = 1024
END_AREA = 0xFF

_HELLO = struct.Struct("<8sHBB4x32s")
_STREAM = struct.Struct("<II QQ Q BxxxxxxxQQ QQQQ QQQ")
_REQUEST = struct.Struct("<III4x Q BxxxxxxxQQ Q q")
_REPLY = struct.Struct("<IIII")
_INFO = struct.Struct("<QQQQ QQ I4x IQIQIQIQ")
_CHUNK = struct.Struct("<II QQQ")
_DIGEST = struct.Struct("<Q")

_HELLO_MAGIC = b"DEADPOOL"
_STREAM_MAGIC, _REQUEST_MAGIC, _REPLY_MAGIC, _CHUNK_MAGIC = 0x44500001, 0x44500002, 0x44500003, 0x44500004

HELLO_BYTES = _HELLO.size
STREAM_BYTES = _STREAM.size + _DIGEST.size
REQUEST_BYTES = _REQUEST.size + _DIGEST.size
REPLY_BYTES = _REPLY.size
INFO_BYTES = _INFO.size + _DIGEST.size
CHUNK_HEADER_BYTES = _CHUNK.size


class BadFrame(TransportFailed):
    """Bytes that no peer of this job would send."""


class Kind(IntEnum):
    """What a connection is for."""

    PUSH = 1
    FETCH = 2


class Code(IntEnum):
    """Answers."""

    ACCEPT = 1
    HELD = 2
    REFUSED = 3
    FAILED = 4


def encode_hello(job_token: str, kind: Kind, lane: Lane) -> bytes:
    """First frame of a connection."""
    return _HELLO.pack(_HELLO_MAGIC, VERSION, kind, lane, _token_digest(job_token))


def decode_hello(frame: bytes, job_token: str) -> tuple[Kind, Lane]:
    """Refuse peers of other programs, versions and jobs."""
    magic, version, kind, lane, token = _HELLO.unpack(frame)
    if magic != _HELLO_MAGIC:
        raise BadFrame("not a DeadPool peer")
    if version != VERSION:
        raise BadFrame(f"data protocol {version}, this host speaks {VERSION}")
    if not hmac.compare_digest(token, _token_digest(job_token)):
        raise BadFrame("token of another job")
    try:
        return Kind(kind), Lane(lane)
    except ValueError as error:
        raise BadFrame(str(error)) from error


def encode_stream(header: StreamHeader) -> bytes:
    """Announce a push."""
    has_keep, keep_step, keep_generation = _encode_name(header.keep)
    return _sealed(
        _STREAM.pack(
            _STREAM_MAGIC,
            header.rank,
            header.name.step,
            header.name.generation,
            header.generation,
            has_keep,
            keep_step,
            keep_generation,
            *_sizes_of(header.layout),
            header.blob_len,
            header.once_len,
            header.once_checksum,
        )
    )


def decode_stream(frame: bytes) -> StreamHeader:
    """The other way round."""
    fields = _STREAM.unpack(_unsealed(frame))
    _expect(fields[0], _STREAM_MAGIC, "stream header")
    _, rank, step, name_generation, generation, has_keep, keep_step, keep_generation, *sizes = fields
    *layout, blob_len, once_len, once_checksum = sizes
    return StreamHeader(
        rank=rank,
        name=Name(step=step, generation=name_generation),
        generation=generation,
        keep=Name(step=keep_step, generation=keep_generation) if has_keep else None,
        layout=_layout_of(layout),
        blob_len=blob_len,
        once_len=once_len,
        once_checksum=once_checksum,
    )


def encode_request(request: FetchRequest) -> bytes:
    """Ask for a part of a copy."""
    has_name, step, generation = _encode_name(request.name)
    length = -1 if request.length_bytes is None else request.length_bytes
    return _sealed(
        _REQUEST.pack(
            _REQUEST_MAGIC,
            request.rank,
            request.part,
            request.generation,
            has_name,
            step,
            generation,
            request.offset_bytes,
            length,
        )
    )


def decode_request(frame: bytes) -> FetchRequest:
    """The other way round."""
    fields = _REQUEST.unpack(_unsealed(frame))
    _expect(fields[0], _REQUEST_MAGIC, "fetch request")
    _, rank, part, generation, has_name, step, name_generation, offset, length = fields
    if part not in tuple(Part):
        raise BadFrame(f"part {part}")
    return FetchRequest(
        rank=rank,
        part=Part(part),
        generation=generation,
        name=Name(step=step, generation=name_generation) if has_name else None,
        offset_bytes=offset,
        length_bytes=None if length < 0 else length,
    )


def encode_reply(code: Code, *, need_once: bool = False, reason: str = "") -> bytes:
    """Answer, with a bounded reason."""
    text = reason.encode()[:MAX_REASON_BYTES]
    return _REPLY.pack(_REPLY_MAGIC, code, need_once, len(text)) + text


def decode_reply(frame: bytes) -> tuple[Code, bool, int]:
    """Return (code, holder needs the write-once area, bytes of reason that follow)."""
    magic, code, need_once, reason_bytes = _REPLY.unpack(frame)
    _expect(magic, _REPLY_MAGIC, "reply")
    if code not in tuple(Code) or reason_bytes > MAX_REASON_BYTES:
        raise BadFrame(f"reply {code} with {reason_bytes} bytes of reason")
    return Code(code), bool(need_once), reason_bytes


def encode_info(info: CopyInfo) -> bytes:
    """Sizes that follow an accepted fetch."""
    areas = [number for area in info.areas for number in area]
    areas += [0] * (2 * len(Area) - len(areas))
    return _sealed(
        _INFO.pack(
            *_sizes_of(info.layout),
            info.blob_len,
            info.once_len,
            len(info.areas),
            *areas,
        )
    )


def decode_info(frame: bytes) -> CopyInfo:
    """The other way round."""
    fields = _INFO.unpack(_unsealed(frame))
    layout, (blob_len, once_len, n_areas, *areas) = fields[:4], fields[4:]
    if n_areas > len(Area) or any(area not in tuple(Area) for area in areas[::2]):
        raise BadFrame(f"areas {areas}")
    return CopyInfo(
        layout=_layout_of(layout),
        blob_len=blob_len,
        once_len=once_len,
        areas=tuple((Area(areas[2 * i]), areas[2 * i + 1]) for i in range(n_areas)),
    )


def encode_chunk(area: Area, offset: int, n_bytes: int, digest: int) -> bytes:
    """Header of one chunk."""
    return _CHUNK.pack(_CHUNK_MAGIC, area, offset, n_bytes, digest)


def decode_chunk(frame: bytes, area: Area, offset: int, n_bytes: int) -> int:
    """Return the digest of the chunk that must come now; any other is refused."""
    magic, got_area, got_offset, got_bytes, digest = _CHUNK.unpack(frame)
    _expect(magic, _CHUNK_MAGIC, "chunk header")
    if got_area == END_AREA:
        raise TransportFailed("the sender gave up the stream")
    if (got_area, got_offset, got_bytes) != (area, offset, n_bytes):
        raise BadFrame(f"chunk {got_area}/{got_offset}/{got_bytes} instead of {area}/{offset}/{n_bytes}")
    return int(digest)


def encode_end(checksum: int | None) -> bytes:
    """End of the chunks; None: the bytes sent must not be used."""
    return _CHUNK.pack(_CHUNK_MAGIC, END_AREA, 0, checksum is not None, checksum or 0)


def decode_end(frame: bytes) -> int:
    """Return the checksum; raise TransportFailed if the bytes must not be used."""
    magic, area, _, is_good, checksum = _CHUNK.unpack(frame)
    _expect(magic, _CHUNK_MAGIC, "end")
    _expect(area, END_AREA, "end")
    if not is_good:
        raise TransportFailed("the copy was overwritten or stopped while it was sent")
    return int(checksum)


def _encode_name(name: Name | None) -> tuple[bool, int, int]:
    return (False, 0, 0) if name is None else (True, name.step, name.generation)


def _sizes_of(layout: SegmentLayout) -> tuple[int, int, int, int]:
    return layout.once_bytes, layout.blob_capacity, layout.unique_bytes, layout.replicated_bytes


def _layout_of(sizes: Sequence[int]) -> SegmentLayout:
    once_bytes, blob_capacity, unique_bytes, replicated_bytes = sizes
    return SegmentLayout(
        once_bytes=once_bytes,
        blob_capacity=blob_capacity,
        unique_bytes=unique_bytes,
        replicated_bytes=replicated_bytes,
    )


def _token_digest(job_token: str) -> bytes:
    return hashlib.sha256(job_token.encode()).digest()


def _sealed(frame: bytes) -> bytes:
    return frame + _DIGEST.pack(chunk_digest(memoryview(frame)))


def _unsealed(frame: bytes) -> bytes:
    body = frame[: -_DIGEST.size]
    if _DIGEST.pack(chunk_digest(memoryview(body))) != frame[-_DIGEST.size :]:
        raise BadFrame("header fails its checksum")
    return body


def _expect(actual: int, expected: int, what: str) -> None:
    if actual != expected:
        raise BadFrame(f"{what} expected, {actual:#x} came")
