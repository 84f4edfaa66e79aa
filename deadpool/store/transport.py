"""The interface that moves copies between hosts, and the values that it carries.

A `Transport` carries bytes and checks them chunk by chunk. It decides nothing: what is sent comes from
a `Source`, what is received goes to a `Sink`, and an `Endpoint` says yes or no to what arrives.
Streams of one copy:

    push   owner -> holder    write-once area if the holder lacks it, blob, unique area, commit, answer
    fetch  any host -> joining host    the areas asked for, then the word that nobody overwrote them

RDMA (NIXL, UCX) can stand behind `Transport`; nothing else here knows about sockets.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from deadpool.core.types import Name
from deadpool.errors import SnapshotError
from deadpool.store.segment import SegmentLayout

Address = tuple[str, int]

BASE_TIMEOUT_S = 10.0
FLOOR_BYTES_PER_S = 50e6
"""A stream slower than this has failed. A nice-19 thread on a busy host still did 240 MB/s (measured)."""


BULK_NICE = 19
"""Both cores busy, full replication: +41 % step time at normal priority, +5.6 % at nice 19 (measured)."""


class PeerRefused(SnapshotError):
    """The other side said no, with a reason; asking again would not help."""


class TransportFailed(SnapshotError):
    """The connection broke or was too slow; asking again may help."""


class StreamStopped(SnapshotError):
    """This side stopped the stream."""


class Area(IntEnum):
    """A range of a segment that travels."""

    ONCE = 0
    BLOB = 1
    UNIQUE = 2
    REPLICATED = 3


class Part(IntEnum):
    """What a fetch asks for."""

    UNIQUE = 0  # blob and unique area
    REPLICATED = 1
    ONCE = 2


class Lane(IntEnum):
    """SMALL: normal priority. BULK: nice 19 on both sides, so that training keeps its cores."""

    SMALL = 0
    BULK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHeader:
    """Announces one push."""

    rank: int
    name: Name
    generation: int  # current generation of the sender, not that of the capture
    keep: Name | None  # committed name: the holder must not overwrite it
    layout: SegmentLayout  # the owner's sizes
    blob_len: int
    once_len: int
    once_checksum: int

    @property
    def travelling_bytes(self) -> int:
        return self.blob_len + self.layout.unique_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """Asks for one part of one copy."""

    rank: int
    part: Part
    generation: int
    name: Name | None = None  # None only for ONCE: the same bytes belong to every copy
    offset_bytes: int = 0  # REPLICATED: range within the source's replicated area
    length_bytes: int | None = None  # None: up to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyInfo:
    """Answers a fetch: the sizes, before the bytes."""

    layout: SegmentLayout
    blob_len: int
    once_len: int
    areas: tuple[tuple[Area, int], ...]  # (area, bytes) in the order in which they come


Views = Sequence[tuple[Area, memoryview]]


class Source(Protocol):
    """Bytes to send."""

    @property
    def areas(self) -> Views: ...

    def check(self) -> None:
        """Raise StreamStopped once the stream is not wanted any more; called often, also while waiting."""

    def on_cancel(self, hook: Callable[[], None] | None) -> None:
        """Call `hook` (must not block) when the stream is stopped, or was already. None: forget it."""

    def sent(self, n_bytes: int) -> None:
        """Count bytes at the socket."""

    def chunk_sent(self, area: Area, digest: int) -> None: ...

    def finish(self) -> int:
        """All bytes were read: give up the bank. Return the checksum.

        Raises:
            StreamStopped: it was stopped, or the bank was overwritten, before this call.
        """


class Sink(Protocol):
    """Place for the bytes of a push."""

    @property
    def areas(self) -> Views: ...

    def check(self) -> None:
        """Raise StreamStopped once the stream is not wanted any more."""

    def chunk_received(self, area: Area, n_bytes: int, digest: int) -> None:
        """One chunk arrived and its digest holds."""

    def commit(self, checksum: int) -> None:
        """All arrived: the copy is complete.

        Raises:
            ReplicaCorrupt: the checksum differs.
            StreamStopped: fenced, or replaced by another stream.
        """


class Endpoint(Protocol):
    """What a host does with streams and fetches that arrive (data_server.py)."""

    def open_sink(
        self, header: StreamHeader, cancel: Callable[[], None]
    ) -> AbstractContextManager[Sink] | None:
        """Accept a push; None if that copy is already complete here.

        Leaving the context without commit leaves nothing complete. `cancel` is called, and must not
        block, if the stream has to end early.

        Raises:
            PeerRefused: not accepted.
        """

    def open_source(self, request: FetchRequest) -> tuple[CopyInfo, AbstractContextManager[Source]]:
        """Serve a fetch.

        Raises:
            PeerRefused: no such copy here.
        """


class Transport(ABC):
    """Moves copies between hosts. Thread-safe."""

    @abstractmethod
    def serve(self, endpoint: Endpoint) -> Address:
        """Let `endpoint` answer streams and fetches from now on; return where."""

    @abstractmethod
    def push(
        self, address: Address, header: StreamHeader, source: Source, *, lane: Lane, timeout_s: float
    ) -> None:
        """Send one copy; return once the holder has it complete.

        Raises:
            PeerRefused, TransportFailed, StreamStopped.
        """

    @abstractmethod
    def fetch(
        self,
        address: Address,
        request: FetchRequest,
        place: Callable[[CopyInfo], Sequence[memoryview]],
        *,
        timeout_s: float,
    ) -> CopyInfo:
        """Get one part of a copy into the views that `place` returns, one for each area announced.

        Raises:
            PeerRefused: no such copy there.
            TransportFailed: broken or slow connection, or the copy was overwritten while it was read.
            ReplicaCorrupt: a chunk failed its checksum.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop serving, break what is running, join the threads within a bound."""


class Deadline:
    """A point in time that a whole exchange shares."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._at_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._what = what

    def check(self) -> None:
        """Raise TransportFailed when it has passed."""
        if time.monotonic() > self._at_s:
            raise TransportFailed(f"{self._what}: not done within {self._timeout_s:.1f} s")


def timeout_for(n_bytes: int) -> float:
    """The limit for a transfer of this size: DESIGN's 10 s + bytes / floor rate."""
    return BASE_TIMEOUT_S + n_bytes / FLOOR_BYTES_PER_S


def lower_priority() -> None:
    """Give the calling thread the priority of Lane.BULK."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BULK_NICE)


def areas_to_send(areas: Views, *, need_once: bool) -> Views:
    """Leave out the write-once area where the holder has it."""
    return [(area, view) for area, view in areas if need_once or area is not Area.ONCE]


def match_views(info: CopyInfo, views: Sequence[memoryview]) -> Views:
    """Pair announced areas with the places for them."""
    if [len(view) for view in views] != [n_bytes for _, n_bytes in info.areas]:
        raise TransportFailed(f"places of {[len(view) for view in views]} bytes for areas {info.areas}")
    return [(area, view) for (area, _), view in zip(info.areas, views, strict=True)]
