"""Counters for status and the report."""

from __future__ import annotations

import threading
from collections import Counter


class Metrics:
    """Named counters that several threads add to; all start at 0."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def as_dict(self) -> dict[str, int]:
        """A snapshot of all counters."""
        with self._lock:
            return dict(self._counts)
