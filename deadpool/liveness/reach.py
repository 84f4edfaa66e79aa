"""Which hosts cannot be connected to from here: asked when a rebuild failed, to tell links from hosts."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Sequence

CONNECT_LIMIT_S = 1.0
_AT_ONCE = 256
"""Connections under way at the same time: far from the usual limit of 1,024 descriptors."""


def find_unreachable(
    addresses: Sequence[tuple[str, int]], limit_s: float = CONNECT_LIMIT_S
) -> tuple[int, ...]:
    """Try to connect to all of them.

    A host that refuses the connection was reached: what listened there is gone, which others find out.

    Args:
        addresses: IP address and port.
        limit_s: how long a connection may take; 256 are under way at a time.

    Returns:
        Indices of those that did not answer.
    """
    found: list[int] = []
    for start in range(0, len(addresses), _AT_ONCE):
        found += (start + index for index in _silent(addresses[start : start + _AT_ONCE], limit_s))
    return tuple(found)


def _silent(addresses: Sequence[tuple[str, int]], limit_s: float) -> list[int]:
    waiting: dict[int, socket.socket] = {}
    silent: list[int] = []
    with selectors.DefaultSelector() as selector:
        for index, (host, port) in enumerate(addresses):
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            code = sock.connect_ex((host, port))
            if code == errno.EINPROGRESS:
                selector.register(sock, selectors.EVENT_WRITE, index)
                waiting[index] = sock
                continue
            sock.close()
            if code not in (0, errno.ECONNREFUSED):
                silent.append(index)  # no route
        deadline_s = time.monotonic() + limit_s
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                sock = waiting.pop(key.data)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code not in (0, errno.ECONNREFUSED):
                    silent.append(key.data)
                selector.unregister(sock)
                sock.close()
        for sock in waiting.values():
            sock.close()
    return sorted([*silent, *waiting])
