"""A declared quiet section: this rank makes no step for long, on purpose."""

from __future__ import annotations

from deadpool.liveness.progress import WorkerPage


class QuietSection:
    """Context manager: this rank makes no step for long, on purpose."""

    def __init__(self, page: WorkerPage) -> None:
        self._page = page

    def __enter__(self) -> None:
        self._page.set_quiet(True)

    def __exit__(self, *_: object) -> None:
        self._page.set_quiet(False)
