"""Noticing that this process itself was stopped or starved: whoever slept cannot call others silent."""

from __future__ import annotations


class PauseMeter:
    """Measures by how much a periodic loop comes late.

    Args:
        interval_s: intended time between two ticks.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s: float | None = None

    def tick(self, now_s: float) -> float:
        """Seconds lost since the last tick: 0 unless the loop is late by more than one interval.

        `now_s` must be CLOCK_BOOTTIME: CLOCK_MONOTONIC stands still while the machine sleeps.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return 0.0
        late_s = now_s - last_s - self._interval_s
        return late_s if late_s > self._interval_s else 0.0
