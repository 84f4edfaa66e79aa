"""What is physically in the banks of a small world, and which losses it survives."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from deadpool.core.plan import newest_live_name
from deadpool.core.types import Inventory, Name, RankCopies


class Bank(NamedTuple):
    """What is physically in a bank."""

    name: Name | None
    kind: str  # E empty, W being written, C complete, X looks complete but is torn


EMPTY = Bank(None, "E")

Banks = tuple[Bank, Bank]
"""Bank 0 and bank 1 of one rank on one host."""

Disks = tuple[tuple[Banks, Banks, Banks | None], ...]
"""What is physically there: per rank the own banks, those on the holder, those on a former holder."""


@lru_cache(maxsize=100_000)
def survivors_of(disks: Disks, shift: int) -> tuple[Name | None, ...]:
    """Per host that dies, and at the end if none does, the step that all could resume from.

    Cached: many worlds differ only in what is on the wire.
    """
    return tuple(
        newest_live_name(len(disks), inventories_of(disks, shift, victim))
        for victim in (*range(len(disks)), -1)
    )


def inventories_of(disks: Disks, shift: int, victim: int) -> list[Inventory]:
    """What every host but `victim` would ack."""
    hosts = len(disks)
    copies: list[list[RankCopies]] = [[] for _ in disks]
    for rank, (own, hold, retired) in enumerate(disks):
        copies[rank].append(RankCopies(rank=rank, own=tuple(complete_names(own))))
        copies[(rank + shift) % hosts].append(RankCopies(rank=rank, held=tuple(complete_names(hold))))
        if retired is not None:
            copies[(rank + 1) % hosts].append(RankCopies(rank=rank, held=tuple(complete_names(retired))))
    return [Inventory(member=str(h), copies=tuple(copies[h])) for h in range(hosts) if h != victim]


def complete_names(banks: Banks) -> set[Name]:
    """Names whose checksum holds."""
    return {bank.name for bank in banks if bank.kind in "CX" and bank.name is not None}


def name_in(bank: Bank) -> Name | None:
    """The name that is complete in `bank`."""
    return bank.name if bank.kind in "CX" else None


def put(banks: Banks, bank: int, content: Bank) -> Banks:
    """`banks` with `content` in one of them."""
    return (content, banks[1]) if bank == 0 else (banks[0], content)
