"""What the listening ports of a host have in common: how they are opened, and what strangers may do to them.

A scanner, a health check, another job, an attacker: they cost one connection each and a line, never the job.
Every port holds to the same rules: a stranger says who it is within HELLO_TIMEOUT_S and in at most
HELLO_FRAME_BYTES, at most MAX_STRANGERS are listened to at once, and a flood of them floods no log.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
HELLO_FRAME_BYTES = 4096  # a name, a token and a few numbers
MAX_STRANGERS = 1024  # above the hosts that may greet a leader at once after it was elected; 4 MiB at most
ACCEPT_PAUSE_S = 0.1  # after accept() failed: without descriptors it would fail again at once

_LINES_A_PERIOD = 10
_PERIOD_S = 60.0


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """Listen on one address of this host, IPv4 or IPv6; port 0: any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


class StrangerLog:
    """Says who was turned away at one port: a few lines a minute, the rest as a number. Thread-safe.

    Args:
        port_name: what the port is for.
    """

    def __init__(self, port_name: str) -> None:
        self._port_name = port_name
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._lines = 0
        self._untold = 0

    def turned_away(self, peer: object, why: str) -> None:
        """A connection of `peer` was closed."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._began_s > _PERIOD_S:
                self._began_s, self._lines = now_s, 0
            if self._lines >= _LINES_A_PERIOD:
                self._untold += 1
                return
            self._lines += 1
            untold, self._untold = self._untold, 0
        also = f"; {untold} others since the last line" if untold else ""
        logger.warning("%s port: closed a connection of %s: %s%s", self._port_name, peer, why, also)
