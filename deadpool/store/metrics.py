"""Counters for status and the report."""

from __future__ import annotations

import threading
from collections import Counter


class Metrics:
    """Named counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def as_dict(self) -> dict[str, int]:
        """All counters; one that never counted is missing, and a Counter would say 0."""
        with self._lock:
            return dict(self._counts)
