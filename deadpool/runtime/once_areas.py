"""Write-once areas that this host has, or gets from other hosts: what a rank is built and laid out from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from deadpool.core.types import MemberId, RankCopies, ReplicatedGroup, Source, View
from deadpool.errors import ConfigError, SnapshotError
from deadpool.runtime.once import OnceArea
from deadpool.runtime.parts import HostParts
from deadpool.store.memory_check import check_memory
from deadpool.store.segment import Segment, SegmentLayout

RETRY_S = 0.5
ANSWER_S = 60.0  # every source is asked in turn, each with a deadline of its own
ROOM_BYTES = 64 << 10
"""Areas of two ranks differ by some bytes; in these steps their segments are alike."""


class OnceAreas:
    """On the agent's main thread.

    Args:
        member: this incarnation.
        parts: see HostParts.
        arrived: called when an area that was asked for is here.
    """

    def __init__(self, member: MemberId, parts: HostParts, arrived: Callable[[], None]) -> None:
        self._member = member
        self._parts = parts
        self._arrived = arrived
        self._areas: dict[int, bytes] = {}
        self._next_ask_s: dict[int, float] = {}

    def clear(self) -> None:
        """The job forms anew: the ranks will write others."""
        self._areas.clear()
        self._next_ask_s.clear()

    def put(self, rank: int, area: bytes) -> None:
        self._areas[rank] = area

    def get(self, rank: int) -> bytes | None:
        """The area of a rank, if this host has it."""
        if rank not in self._areas:
            for segment in (self._parts.store.own(rank), self._parts.store.held(rank)):
                if segment is not None and segment.once_is_sealed:
                    self._areas[rank] = bytes(segment.once_view()[: segment.once_len])
                    break
        return self._areas.get(rank)

    def ask(self, rank: int, view: View) -> None:
        """Get it from the rank's owner, from its holders, or from anybody; `arrived` follows."""
        if time.monotonic() < self._next_ask_s.get(rank, 0.0):
            return
        self._next_ask_s[rank] = time.monotonic() + ANSWER_S
        slot = view.slot_of_rank(rank)
        holders = view.holders[slot] if view.holders else ()
        sources = [view.slots[slot], *view.leaving, *(view.slots[holder] for holder in holders), *view.slots]
        known = [source for source in dict.fromkeys(sources) if source and source != self._member]

        def answered(rank: int, area: bytes | None, why: str) -> None:
            if area is None and view.source is Source.CHECKPOINT:
                area = self._from_checkpoint(rank, view)
            if area is None:
                self._next_ask_s[rank] = time.monotonic() + RETRY_S
                what = f"the constructor record of rank {rank} ({why})"
                self._parts.log.emit("wait.long", generation=view.generation, waiting_for=what)
                return
            self._next_ask_s.pop(rank, None)
            self._areas[rank] = area
            self._arrived()

        self._parts.fetcher.once(rank, known, view.generation, answered)

    def check_memory(self, rank: int, area: bytes, host: str, n_ranks: int) -> str:
        """Say what the segments of this host take and what there is; "" or why it is too little.

        Ranks have equal layouts but for small differences, so one stands for all: this host makes
        segments for `n_ranks` own ranks, and holds as many for each replica that is kept.
        """
        layout = segment_layout(area)
        replicas = self._parts.config.store.replication_factor
        try:
            report = check_memory(
                host,
                [layout] * n_ranks,
                [layout] * (n_ranks * replicas),
                made_bytes=self._parts.store.memory_bytes(),
            )
        except ConfigError as error:
            return "\n".join(error.problems)
        if rank % n_ranks == 0:
            self._parts.log.say(f"deadpool: {report}")
        return ""

    def segment_for(self, rank: int, area: bytes) -> Segment:
        """The own segment of a rank; made, with its write-once area in place, if there is none."""
        segment = self._parts.store.own(rank)
        if segment is not None:
            return segment
        segment = self._parts.store.create_own(rank, segment_layout(area))
        segment.write_once(area)
        return segment

    def groups_of(self, copies: Iterable[RankCopies]) -> tuple[ReplicatedGroup, ...]:
        """Replicated groups in the layouts of these ranks."""
        groups: set[ReplicatedGroup] = set()
        for each in copies:
            area = self.get(each.rank)
            if area is not None:
                groups.update(OnceArea.decode(area).groups)
        return tuple(sorted(groups, key=lambda group: group.ranks))

    def _from_checkpoint(self, rank: int, view: View) -> bytes | None:
        """Every copy in memory is lost: the shard of a checkpoint has the area, too."""
        if view.rollback is None:
            return None
        try:
            return self._parts.checkpoints.read_once(rank, view.rollback)
        except SnapshotError:
            return None  # said by the caller, and tried again


def segment_layout(area: bytes) -> SegmentLayout:
    """Sizes of the segment of the rank that wrote `area`."""
    sizes = OnceArea.decode(area)
    return SegmentLayout(
        once_bytes=-(-len(area) // ROOM_BYTES) * ROOM_BYTES,
        blob_capacity=sizes.blob_capacity,
        unique_bytes=sizes.unique_bytes,
        replicated_bytes=sizes.replicated_bytes,
    )
