"""The write-once area of a segment: all that a spare needs to build a rank and make room for its state."""

from __future__ import annotations

import msgspec

from deadpool.core.types import ReplicatedGroup


class OnceArea(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the first worker of a rank, replicated once, never changed."""

    record: bytes  # constructor record of the rank
    layout: bytes  # layout of its banks, as its own encoding
    layout_hash: str
    blob_capacity: int
    unique_bytes: int
    replicated_bytes: int
    spans: list[tuple[list[int], int, int]]  # replicated groups: ranks, start and bytes in the area

    @property
    def groups(self) -> tuple[ReplicatedGroup, ...]:
        return tuple(ReplicatedGroup(ranks=tuple(ranks)) for ranks, _, _ in self.spans)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> OnceArea:
        return msgspec.msgpack.decode(data, type=cls)
