"""How a joining host gets the state of its ranks: the write-once area first, then the named copy.

The caller opens the own bank with `begin`, fetches into it, and calls `complete` with the returned
length of the blob once all parts are there.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from deadpool.core.types import Name
from deadpool.errors import LayoutMismatch, SnapshotError
from deadpool.store.segment import Segment, SegmentLayout
from deadpool.store.transport import (
    Address,
    CopyInfo,
    FetchRequest,
    Part,
    Transport,
    TransportFailed,
    timeout_for,
)

MAX_ONCE_BYTES = 1 << 30
"""Most that a peer's answer may make this host allocate for a write-once area."""


def fetch_once(
    transport: Transport,
    address: Address,
    rank: int,
    *,
    generation: int,
    name: Name | None = None,
    timeout_s: float | None = None,
) -> tuple[bytes, SegmentLayout]:
    """Fetch a rank's write-once area and the sizes of its segment.

    Args:
        transport: carries it.
        address: data address of the rank's owner or holder.
        rank: logical rank.
        generation: current generation.
        name: a copy that must be complete there; None: any.
        timeout_s: limit; None: by size.
    """
    data = bytearray()

    def place(info: CopyInfo) -> Sequence[memoryview]:
        if info.once_len > MAX_ONCE_BYTES:
            raise TransportFailed(f"{address} announces a write-once area of {info.once_len} bytes")
        data.extend(bytes(info.once_len))
        return [memoryview(data)]

    request = FetchRequest(rank=rank, part=Part.ONCE, generation=generation, name=name)
    limit_s = timeout_for(MAX_ONCE_BYTES) if timeout_s is None else timeout_s
    info = _fetch(transport, address, request, place, limit_s)
    return bytes(data), info.layout


def fetch_unique(
    transport: Transport,
    address: Address,
    rank: int,
    name: Name,
    *,
    generation: int,
    into: Segment,
    bank: int,
    timeout_s: float | None = None,
) -> int:
    """Fetch blob and unique area of a copy into an own bank; return the blob's length.

    Raises:
        LayoutMismatch: the copy there has other sizes.
    """

    def place(info: CopyInfo) -> Sequence[memoryview]:
        if info.layout != into.layout:
            raise LayoutMismatch(f"rank {rank}: copy at {address} has {info.layout}, here {into.layout}")
        return [into.blob_view(bank)[: info.blob_len], into.unique_view(bank)]

    request = FetchRequest(rank=rank, part=Part.UNIQUE, generation=generation, name=name)
    limit_s = timeout_for(into.layout.blob_capacity + into.layout.unique_bytes)
    info = _fetch(transport, address, request, place, limit_s if timeout_s is None else timeout_s)
    return info.blob_len


def fetch_replicated(
    transport: Transport,
    address: Address,
    rank: int,
    name: Name,
    *,
    generation: int,
    offset_bytes: int,
    into: memoryview,
    timeout_s: float | None = None,
) -> None:
    """Fetch `len(into)` bytes at an offset of the replicated area of source rank `rank`."""
    request = FetchRequest(
        rank=rank,
        part=Part.REPLICATED,
        generation=generation,
        name=name,
        offset_bytes=offset_bytes,
        length_bytes=len(into),
    )
    limit_s = timeout_for(len(into)) if timeout_s is None else timeout_s
    _fetch(transport, address, request, lambda _: [into], limit_s)


def _fetch(
    transport: Transport,
    address: Address,
    request: FetchRequest,
    place: Callable[[CopyInfo], Sequence[memoryview]],
    timeout_s: float,
) -> CopyInfo:
    try:
        return transport.fetch(address, request, place, timeout_s=timeout_s)
    except SnapshotError as error:
        # Whoever keeps the error would keep its frames, their views, and so the memory of a whole segment.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        raise
