"""Whether something listens at an address."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

DIAL_LIMIT_S = 1.0
DIALS_AT_ONCE = 64

Address = tuple[str, int]


def answers(address: Address, limit_s: float = DIAL_LIMIT_S) -> bool:
    """Whether a connection to `address` is accepted within the limit."""
    try:
        with socket.create_connection(address, timeout=limit_s):
            return True
    except OSError:
        return False


def silent_ones(addresses: Sequence[Address]) -> tuple[Address, ...]:
    """Those of the addresses that accept no connection; DIALS_AT_ONCE are tried at the same time."""
    with ThreadPoolExecutor(DIALS_AT_ONCE) as pool:
        found = pool.map(answers, addresses)
        return tuple(address for address, answer in zip(addresses, found, strict=True) if not answer)
