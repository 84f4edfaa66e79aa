"""Whether the ranks of each replicated group built the same buffers. Pure; `deadpool.runtime.state` gathers.

Copies of replicated buffers are fetched by their place, from whichever rank of the group is healthy. Ranks
that place other buffers there would restore one another's bytes without a word, so the job does not start.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from deadpool.errors import LayoutMismatch
from deadpool.snapshot.layout import Buffer, Layout, replicated_buffers
from deadpool.words import listed

Ranks = tuple[int, ...]
MAX_NAMED = 5


def digest_groups(layout: Layout) -> dict[Ranks, str]:
    """Replicated group -> digest of names, types and shapes of its buffers on this rank, in their order."""
    texts: dict[Ranks, list[str]] = {}
    for buffer in replicated_buffers(layout):
        texts.setdefault(buffer.ranks, []).append(f"{buffer.name} {_describe(buffer)}")
    return {ranks: hashlib.sha256("\n".join(lines).encode()).hexdigest() for ranks, lines in texts.items()}


def find_unlike_groups(digests_of_ranks: Mapping[int, Mapping[Ranks, str]]) -> tuple[Ranks, ...]:
    """Groups whose ranks did not all build the same. Every rank finds the same ones."""
    groups = {ranks for digests in digests_of_ranks.values() for ranks in digests}
    return tuple(
        ranks
        for ranks in sorted(groups)
        if len({digests_of_ranks.get(rank, {}).get(ranks) for rank in ranks}) > 1
    )


def describe_buffers(layout: Layout, groups: tuple[Ranks, ...]) -> dict[str, str]:
    """What this rank built for these groups: buffer -> type and shape."""
    return {buffer.name: _describe(buffer) for buffer in replicated_buffers(layout) if buffer.ranks in groups}


def refuse_unlike(groups: tuple[Ranks, ...], built_by: Mapping[int, Mapping[str, str]]) -> None:
    """Say who built what.

    Args:
        groups: from `find_unlike_groups`, not empty.
        built_by: rank -> `describe_buffers` of that rank.

    Raises:
        LayoutMismatch: always; names ranks and buffers.
    """
    lines = []
    for ranks in groups:
        names = sorted({name for rank in ranks for name in built_by.get(rank, {})})
        for name in names:
            by_shape = Counter(built_by.get(rank, {}).get(name, "nothing") for rank in ranks)
            usual = by_shape.most_common(1)[0][0]
            odd = [rank for rank in ranks if built_by.get(rank, {}).get(name, "nothing") != usual]
            if odd:
                found = built_by.get(odd[0], {}).get(name, "nothing")
                lines.append(f"{name}: {found} on rank {listed(odd)}, {usual} on the others")
        if not names or not lines:
            lines.append(f"ranks {listed(list(ranks))} built the same buffers in different orders")
    more = f"\n  and {len(lines) - MAX_NAMED} more" if len(lines) > MAX_NAMED else ""
    raise LayoutMismatch(
        "the ranks of a replicated group built different states:\n  "
        + "\n  ".join(lines[:MAX_NAMED])
        + more
        + "\nModel and optimizer must not depend on the rank where their gradients are averaged."
    )


def _describe(buffer: Buffer) -> str:
    return f"{buffer.dtype} {list(buffer.shape)}"
