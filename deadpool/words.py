"""How messages name things."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 8


def listed(items: Sequence[object], most: int = MOST_NAMED) -> str:
    """`a, b and 12 more`: a message stays readable however many hosts or ranks it is about."""
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
