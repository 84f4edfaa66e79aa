"""Frames of the data port: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool.core.types import Name
from deadpool.errors import SnapshotError
from deadpool.store import wire
from deadpool.store.segment import SegmentLayout
from deadpool.store.transport import Area, CopyInfo, FetchRequest, Lane, Part, StreamHeader

u32 = st.integers(0, (1 << 32) - 1)
u63 = st.integers(0, (1 << 63) - 1)
names = st.builds(Name, step=u63, generation=u63)
layouts = st.builds(SegmentLayout, once_bytes=u63, blob_capacity=u63, unique_bytes=u63, replicated_bytes=u63)
headers = st.builds(
    StreamHeader,
    rank=u32,
    name=names,
    generation=u63,
    keep=st.none() | names,
    layout=layouts,
    blob_len=u63,
    once_len=u63,
    once_checksum=u63,
)
requests = st.builds(
    FetchRequest,
    rank=u32,
    part=st.sampled_from(Part),
    generation=u63,
    name=st.none() | names,
    offset_bytes=u63,
    length_bytes=st.none() | u63,
)
infos = st.builds(
    CopyInfo,
    layout=layouts,
    blob_len=u63,
    once_len=u63,
    areas=st.lists(st.tuples(st.sampled_from(Area), u63), max_size=4).map(tuple),
)


@given(header=headers, request=requests, info=infos)
def test_values_survive_the_wire(header: StreamHeader, request: FetchRequest, info: CopyInfo) -> None:
    assert wire.decode_stream(wire.encode_stream(header)) == header
    assert wire.decode_request(wire.encode_request(request)) == request
    assert wire.decode_info(wire.encode_info(info)) == info
    assert len(wire.encode_stream(header)) == wire.STREAM_BYTES
    assert len(wire.encode_request(request)) == wire.REQUEST_BYTES
    assert len(wire.encode_info(info)) == wire.INFO_BYTES


@given(data=st.data(), header=headers)
def test_a_changed_byte_of_a_header_is_found(data: st.DataObject, header: StreamHeader) -> None:
    frame = bytearray(wire.encode_stream(header))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(wire.BadFrame):
        wire.decode_stream(bytes(frame))


@given(data=st.data())
def test_any_bytes_are_a_bad_frame_and_nothing_worse(data: st.DataObject) -> None:
    def draw(size: int) -> bytes:
        return data.draw(st.binary(min_size=size, max_size=size))

    for decode in (
        lambda: wire.decode_hello(draw(wire.HELLO_BYTES), "token"),
        lambda: wire.decode_stream(draw(wire.STREAM_BYTES)),
        lambda: wire.decode_request(draw(wire.REQUEST_BYTES)),
        lambda: wire.decode_info(draw(wire.INFO_BYTES)),
        lambda: wire.decode_reply(draw(wire.REPLY_BYTES)),
        lambda: wire.decode_chunk(draw(wire.CHUNK_HEADER_BYTES), Area.BLOB, 0, 10),
        lambda: wire.decode_end(draw(wire.CHUNK_HEADER_BYTES)),
    ):
        with pytest.raises(SnapshotError):
            decode()


def test_peers_of_another_job_version_or_program_are_told_apart() -> None:
    hello = wire.encode_hello("token", wire.Kind.PUSH, Lane.BULK)
    assert wire.decode_hello(hello, "token") == (wire.Kind.PUSH, Lane.BULK)
    with pytest.raises(wire.BadFrame, match="token of another job"):
        wire.decode_hello(hello, "other token")
    with pytest.raises(wire.BadFrame, match="data protocol 2"):
        wire.decode_hello(hello[:8] + b"\2\0" + hello[10:], "token")
    with pytest.raises(wire.BadFrame, match="not a DeadPool peer"):
        wire.decode_hello(b"GET / HT" + hello[8:], "token")


def test_a_chunk_out_of_its_place_is_refused() -> None:
    good = wire.encode_chunk(Area.UNIQUE, 10, 20, 30)
    assert wire.decode_chunk(good, Area.UNIQUE, 10, 20) == 30
    for area, offset, n_bytes in ((Area.BLOB, 10, 20), (Area.UNIQUE, 11, 20), (Area.UNIQUE, 10, 21)):
        with pytest.raises(wire.BadFrame):
            wire.decode_chunk(good, area, offset, n_bytes)
    with pytest.raises(SnapshotError, match="gave up"):
        wire.decode_chunk(wire.encode_end(None), Area.UNIQUE, 10, 20)


def test_a_long_reason_is_cut() -> None:
    frame = wire.encode_reply(wire.Code.REFUSED, reason="x" * 5000)
    assert wire.decode_reply(frame[: wire.REPLY_BYTES]) == (wire.Code.REFUSED, False, wire.MAX_REASON_BYTES)
    assert len(frame) == wire.REPLY_BYTES + wire.MAX_REASON_BYTES
