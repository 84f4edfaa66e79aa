"""Child exit, the fastest signal there is: one thread waits on the pidfds of all children (~1 ms)."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

OnExit = Callable[[int, os.waitid_result | None], None]
_JOIN_TIMEOUT_S = 5.0


class ProcessWatch:
    """Says when a child has ended, and how; its owner reaps it.

    The exit is looked at without reaping (WNOWAIT), so the pid stays taken until the owner waits for it, and
    `subprocess.Popen` still finds its exit code. An owner that was faster is told None instead of the status.
    Callbacks run on the watch's thread, one at a time; they must not block and must not call `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[int, OnExit]] = {}  # pidfd -> (pid, callback)
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)
        self._thread.start()

    def add(self, pid: int, on_exit: OnExit) -> None:
        """Watch a child; one that has already ended is reported at once.

        Raises:
            ProcessLookupError: no such process, or somebody else reaped it.
            RuntimeError: the watch is closed.
        """
        pidfd = os.pidfd_open(pid)  # close-on-exec by definition
        with self._lock:
            if self._closing:
                os.close(pidfd)
                raise RuntimeError("the process watch is closed")
            self._watched[pidfd] = (pid, on_exit)
            self._epoll.register(pidfd, select.EPOLLIN)

    def pids(self) -> tuple[int, ...]:
        """Children whose end was not reported yet."""
        with self._lock:
            return tuple(pid for pid, _ in self._watched.values())

    def close(self) -> None:
        """Stop watching; children that still run are left alone."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("a callback of the process watch did not return within %g s", _JOIN_TIMEOUT_S)
            return  # its descriptors are in use
        self._epoll.close()
        os.close(self._wake)
        for pidfd in self._watched:
            os.close(pidfd)
        self._watched.clear()

    def __enter__(self) -> ProcessWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if self._closing:
                    return
                self._report(fd)

    def _report(self, pidfd: int) -> None:
        try:
            result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            result = None  # its owner has reaped it meanwhile
        else:
            if result is None:
                return  # woken for nothing
        with self._lock:
            self._epoll.unregister(pidfd)
            pid, on_exit = self._watched.pop(pidfd)
        os.close(pidfd)
        on_exit(pid, result)


def describe_exit(result: os.waitid_result) -> str:
    """How a child ended, in words: 'was killed by SIGKILL', 'ended with code 1'."""
    if result.si_code == os.CLD_EXITED:
        return f"ended with code {result.si_status}"
    try:
        name = signal.Signals(result.si_status).name
    except ValueError:  # a real-time signal
        name = f"signal {result.si_status}"
    return f"was killed by {name}" + (" (core dumped)" if result.si_code == os.CLD_DUMPED else "")
