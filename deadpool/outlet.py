"""Writes that may hang, on a thread of their own: a shared folder or a terminal can stand still for minutes.

The agent's main thread decides about the recovery of the job; it must not stand still with them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""A write that takes longer is not waited for, nor is any other until all have caught up."""

MOST_WAITING = 10_000
"""Writes that wait, of a few hundred bytes each; what comes then is lost."""

CLOSE_S = 5.0


class Outlet:
    """Does what it is given, in order. Usually it is done when `do` returns. Safe to call from any thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.n_lost = 0  # left out, for too many waited
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._n_given = 0
        self._n_done = 0
        self._is_behind = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Do this in its turn, and wait a moment for it; after `close`, not at all.

        Args:
            work: must not raise.
        """
        with self._changed:
            if self._is_closed or len(self._waiting) >= MOST_WAITING:
                self.n_lost += 1
                return
            if self._thread is None:
                # A daemon: see `end_process`.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.append(work)
            self._n_given += 1
            number = self._n_given
            self._changed.notify_all()
            if not self._is_behind:
                self._is_behind = not self._changed.wait_for(lambda: self._n_done >= number, PATIENCE_S)

    def close(self, limit_s: float | None = None) -> None:
        """Do what waits, for CLOSE_S or `limit_s` at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S if limit_s is None else limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:  # one that fails must not keep all others back
                logger.exception("a write of %s failed", self._name)
            with self._changed:
                self._n_done += 1
                if not self._waiting:
                    self._is_behind = False
                self._changed.notify_all()


class OutletHandler(logging.Handler):
    """Log lines on standard error, which may be a terminal that somebody has stopped."""

    def __init__(self) -> None:
        super().__init__()
        self._outlet = Outlet("log")

    def emit(self, record: logging.LogRecord) -> None:
        self._outlet.do(partial(print_error, self.format(record)))


def print_error(line: str) -> None:
    """Print on standard error, if that can be."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def end_process(code: int) -> NoReturn:
    """End this process with this code, whatever its output leads to.

    The interpreter flushes standard output and error at its end. Where that fails, as on a full disk, it
    changes the code to 120; where it hangs, so does the process.
    """
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(CLOSE_S)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
