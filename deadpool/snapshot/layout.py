"""Layout of a bank: the closed set of named buffers, their areas and offsets. Imports no torch.

Offsets are relative to the start of a buffer's area. What travels to a holder is the whole unique area;
the replicated area stays on its owner and is fetched by a spare from any live rank of the group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from deadpool.core.types import ReplicatedGroup
from deadpool.errors import LayoutMismatch

FORMAT_VERSION = 1
ALIGN_BYTES = 64  # a cache line: vectorised copies never straddle two buffers
PAGE_BYTES = 4096
MAX_NAMED_DIFFERENCES = 8  # in a message; the rest is counted


class Kind(Enum):
    """Whether the bytes of a buffer exist on this rank only, or on every rank of a group."""

    UNIQUE = "unique"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the layout must know of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    ranks: tuple[int, ...] = ()  # ranks believed to hold the same bytes; () = only this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One named buffer of a bank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    offset: int
    nbytes: int
    ranks: tuple[int, ...] = ()  # REPLICATED: the ranks of its group


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The bytes of one group in the replicated area."""

    group: ReplicatedGroup
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The closed set of buffers of one rank, in the order of the training state's tensors."""

    buffers: tuple[Buffer, ...]
    unique_bytes: int
    replicated_bytes: int
    derived: tuple[tuple[str, str], ...] = ()  # name -> hash of tensors that the constructor rebuilds

    @property
    def spans(self) -> tuple[Span, ...]:
        """Replicated groups with the bytes that each takes, in the order of the replicated area."""
        ends: dict[tuple[int, ...], tuple[int, int]] = {}
        for buffer in self.buffers:
            if buffer.kind is Kind.REPLICATED:
                start, end = ends.get(buffer.ranks, (buffer.offset, 0))
                ends[buffer.ranks] = (min(start, buffer.offset), max(end, buffer.offset + buffer.nbytes))
        ordered = sorted(ends.items(), key=lambda item: item[1])
        return tuple(
            Span(group=ReplicatedGroup(ranks=ranks), start=start, nbytes=end - start)
            for ranks, (start, end) in ordered
        )

    @property
    def groups(self) -> tuple[ReplicatedGroup, ...]:
        """The replicated groups of this rank, in the order of `spans`."""
        return tuple(span.group for span in self.spans)

    def to_json(self) -> bytes:
        """Encode for the write-once area of a segment."""
        return json.dumps(self._as_tree(), separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Layout:
        """Decode what `to_json` wrote.

        Raises:
            LayoutMismatch: the bytes are no layout, or one of another format version.
        """
        try:
            tree = json.loads(data)
            version = tree["version"]
            if version != FORMAT_VERSION:
                raise LayoutMismatch(
                    f"layout has format version {version}, this DeadPool reads {FORMAT_VERSION}"
                )
            buffers = tuple(
                Buffer(
                    name=item["name"],
                    dtype=item["dtype"],
                    shape=tuple(item["shape"]),
                    kind=Kind(item["kind"]),
                    offset=item["offset"],
                    nbytes=item["nbytes"],
                    ranks=tuple(item["ranks"]),
                )
                for item in tree["buffers"]
            )
            return cls(
                buffers=buffers,
                unique_bytes=tree["unique_bytes"],
                replicated_bytes=tree["replicated_bytes"],
                derived=tuple((name, digest) for name, digest in tree["derived"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LayoutMismatch(f"these {len(data)} bytes are no layout: {error!r}") from error

    @property
    def digest(self) -> str:
        """Hash of everything in the layout; equal digests mean interchangeable banks."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def check_same(self, stored: Layout) -> None:
        """Refuse a stored layout that does not fit this one.

        Raises:
            LayoutMismatch: names what differs.
        """
        differences = list(_differences(self, stored))
        if differences:
            shown = differences[:MAX_NAMED_DIFFERENCES]
            more = len(differences) - len(shown)
            tail = f"\n  and {more} more" if more else ""
            raise LayoutMismatch(
                "the stored snapshot does not fit the state that this script built:\n  "
                + "\n  ".join(shown)
                + tail
                + "\nThe script, its arguments and package versions must be the same on every host."
            )

    def fitted_to(self, stored: Layout) -> Layout:
        """This layout with the split into unique and replicated that the job has settled on.

        What a promoted spare calls: the hashes were compared when the job began, without it.

        Raises:
            LayoutMismatch: even so the stored layout differs.
        """
        settled = self.with_unique({item.name for item in stored.buffers if item.kind is Kind.UNIQUE})
        settled.check_same(stored)
        return settled

    def with_unique(self, names: Collection[str]) -> Layout:
        """The same buffers with `names` moved to the unique area."""
        specs = [
            TensorSpec(
                name=buffer.name,
                dtype=buffer.dtype,
                shape=buffer.shape,
                nbytes=buffer.nbytes,
                ranks=() if buffer.name in names else buffer.ranks,
            )
            for buffer in self.buffers
        ]
        return replace(plan_layout(specs), derived=self.derived)

    def _as_tree(self) -> dict[str, Any]:
        return {
            "version": FORMAT_VERSION,
            "unique_bytes": self.unique_bytes,
            "replicated_bytes": self.replicated_bytes,
            "derived": [list(item) for item in self.derived],
            "buffers": [
                {
                    "name": buffer.name,
                    "dtype": buffer.dtype,
                    "shape": list(buffer.shape),
                    "kind": buffer.kind.value,
                    "offset": buffer.offset,
                    "nbytes": buffer.nbytes,
                    "ranks": list(buffer.ranks),
                }
                for buffer in self.buffers
            ],
        }


def plan_layout(
    specs: Sequence[TensorSpec],
    *,
    is_safe: Callable[[tuple[int, ...]], bool] = lambda ranks: len(ranks) > 1,
    derived: Sequence[tuple[str, str]] = (),
) -> Layout:
    """Give every tensor its place. Pure: equal arguments give equal layouts.

    Args:
        specs: the tensors, in the order of the training state.
        is_safe: whether a group of ranks spans enough failure domains for its bytes not to travel.
        derived: names and hashes of tensors that are not stored because the constructor rebuilds them.
    """
    offsets: dict[str, int] = {}
    kinds: dict[str, tuple[int, ...]] = {
        spec.name: spec.ranks if len(spec.ranks) > 1 and is_safe(spec.ranks) else () for spec in specs
    }
    unique_bytes = _place([spec for spec in specs if not kinds[spec.name]], 0, offsets)
    replicated_bytes = 0
    # Groups in sorted order, so that two ranks with the same groups place them alike.
    for ranks in sorted({ranks for ranks in kinds.values() if ranks}):
        members = [spec for spec in specs if kinds[spec.name] == ranks]
        replicated_bytes = _place(members, replicated_bytes, offsets)
    buffers = tuple(
        Buffer(
            name=spec.name,
            dtype=spec.dtype,
            shape=spec.shape,
            kind=Kind.REPLICATED if kinds[spec.name] else Kind.UNIQUE,
            offset=offsets[spec.name],
            nbytes=spec.nbytes,
            ranks=kinds[spec.name],
        )
        for spec in specs
    )
    return Layout(
        buffers=buffers,
        unique_bytes=_round_up(unique_bytes, PAGE_BYTES),
        replicated_bytes=_round_up(replicated_bytes, PAGE_BYTES),
        derived=tuple(derived),
    )


def find_disagreements(layout: Layout, hashes_of_ranks: Mapping[int, Sequence[int]]) -> tuple[str, ...]:
    """Name the replicated buffers whose bytes differ within their group.

    Pure: every rank that calls it with the same hashes gets the same answer.

    Args:
        layout: this rank's layout; the ranks of a group place the group's buffers alike.
        hashes_of_ranks: rank -> hashes in the order of `replicated_buffers`, of all ranks of all groups.
    """
    buffers = replicated_buffers(layout)
    return tuple(
        buffer.name
        for index, buffer in enumerate(buffers)
        if len({hashes_of_ranks[rank][index] for rank in buffer.ranks}) > 1
    )


def replicated_buffers(layout: Layout) -> tuple[Buffer, ...]:
    """The replicated buffers, in layout order."""
    return tuple(buffer for buffer in layout.buffers if buffer.kind is Kind.REPLICATED)


def _place(specs: Sequence[TensorSpec], start: int, offsets: dict[str, int]) -> int:
    offset = start
    for spec in specs:
        offset = _round_up(offset, ALIGN_BYTES)
        offsets[spec.name] = offset
        offset += spec.nbytes
    return offset


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _differences(own: Layout, stored: Layout) -> list[str]:
    found: list[str] = []
    mine = {buffer.name: buffer for buffer in own.buffers}
    theirs = {buffer.name: buffer for buffer in stored.buffers}
    found += [f"{name}: stored, but not in this state" for name in theirs if name not in mine]
    found += [f"{name}: in this state, but not stored" for name in mine if name not in theirs]
    for name, buffer in mine.items():
        other = theirs.get(name)
        if other is not None and other != buffer:
            found.append(f"{name}: here {_describe(buffer)}, stored {_describe(other)}")
    known = dict(stored.derived)
    for name, digest in own.derived:
        if known.get(name, digest) != digest:
            found.append(
                f"{name}: rebuilt by the constructor with another value than on the rank it replaces"
            )
    if not found and own != stored:
        found.append("the same buffers in another order, or areas of another size")
    return found


def _describe(buffer: Buffer) -> str:
    where = f"{buffer.kind.value} at {buffer.offset}"
    return f"{buffer.dtype}{list(buffer.shape)} ({where}, ranks {list(buffer.ranks)})"
