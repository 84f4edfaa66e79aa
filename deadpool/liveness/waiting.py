"""Collectives that a rank waits in for long, from the worker's page. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from deadpool.liveness.progress import WorkerPage

OPERATIONS = (
    "broadcast",
    "allreduce",
    "allreduce_sparse",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "all_gather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "monitored_barrier",
    "coalesced",
)
"""What the native part calls the operations; the page holds 16 bits of the name's hash."""

_BYTES_BITS = 48


def hash_name(name: str) -> int:
    """FNV-1a, 64 bits: how the page names handles and operations."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


_OPERATION_OF = {hash_name(name) & 0xFFFF: name for name in OPERATIONS}


def decode_call(word: int) -> tuple[str, int]:
    """Operation and bytes of a handle's newest collective; bytes are those that one rank brings or gets."""
    return _OPERATION_OF.get(word >> _BYTES_BITS, "unknown"), word & ((1 << _BYTES_BITS) - 1)


@dataclass(slots=True, kw_only=True)
class _Waiting:
    page: WorkerPage
    since_s: dict[tuple[int, int], float] = field(default_factory=dict)  # (hash of the name, issued)
    told: set[tuple[int, int]] = field(default_factory=set)


class CollectiveWatch:
    """Says when a collective of a rank of this host has waited for long, once for each.

    No thread, no clock of its own. Watch a rank only while it trains.

    Args:
        report_s: how long is long.
    """

    def __init__(self, report_s: float) -> None:
        self._report_s = report_s
        self._watched: dict[int, _Waiting] = {}

    def add(self, rank: int, page: WorkerPage) -> None:
        self._watched[rank] = _Waiting(page=page)

    def remove(self, rank: int) -> None:
        self._watched.pop(rank, None)

    def clear(self) -> None:
        self._watched.clear()

    def check(self, now_s: float) -> bool:
        """Whether a collective has become one that waits for long since the last look."""
        found = [self._look(watched, now_s) for watched in self._watched.values()]
        return any(found)

    def _look(self, watched: _Waiting, now_s: float) -> bool:
        sample = watched.page.sample()
        waiting = {(name, issued) for name, issued, completed, _ in sample.handles if completed < issued}
        watched.since_s = {call: watched.since_s.get(call, now_s) for call in waiting}
        watched.told &= waiting
        long = {call for call, since_s in watched.since_s.items() if now_s - since_s >= self._report_s}
        is_new = bool(long - watched.told) and not sample.is_quiet
        watched.told |= long
        return is_new
