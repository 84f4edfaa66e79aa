"""The usual soft limit on open files is 1,024, and a large job has more hosts."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """As high as this process may without privilege."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
