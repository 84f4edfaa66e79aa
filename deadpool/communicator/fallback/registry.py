"""Generations, builds under way, and the one door by which handles are closed; as csrc/registry.h."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch._C._distributed_c10d import Backend

from deadpool.communicator.fallback.process import page, shutdown_sockets, socket_inode, tcp_sockets
from deadpool.errors import CollectiveAborted

GRACE_S = 0.2
"""What gloo has not forgotten fails within a few milliseconds of a close; so does a build."""

_RESCAN_S = 0.002


class Handle(Protocol):
    """What the registry knows of a handle."""

    is_shut_down: bool

    @property
    def handle_name(self) -> str: ...

    def set_inner(self, communicator: Any, sockets: set[int], generation: int) -> None:
        """Begin to use a new communicator."""

    def take_inner(self, generation: int) -> tuple[Any, set[int]]:
        """Let go of the communicator, and of its sockets, if it is of that generation or older."""


def raise_aborted(handle: str, generation: int, why: str) -> NoReturn:
    """Raise CollectiveAborted in the words of the extension."""
    raise CollectiveAborted(
        f"group '{handle}', generation {generation}: {why}; it works again once the next generation is open"
    )


class Registry:
    """All handles of this process. One object: the generation that was closed belongs to the process."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.builds: list[Build] = []
        self._closed = 0
        self._opened = 0
        self._handles: list[weakref.ref[Any]] = []
        self._store_sockets: dict[int, tuple[int, int]] = {}  # fd -> inode, generation
        self._grave: list[Any] = []
        self._blocked: dict[int, tuple[int, Callable[[], None]]] = {}  # id -> generation, make it fail
        self._blocked_count = 0

    def closed_generation(self) -> int:
        return self._closed

    def opened_generation(self) -> int:
        return self._opened

    def is_closed(self) -> bool:
        return self._closed >= self._opened

    def open(self, generation: int) -> None:
        """Declare the generation under which handles are built from now on."""
        with self.changed:
            if generation <= self._closed:
                raise_aborted("*", generation, "closed before it was opened")
            self._opened = generation

    def close(self, generation: int) -> None:
        """In this order: new calls raise, captures freeze, communicators are aborted, half-built ones too."""
        with self.changed:
            if generation > self._closed:
                self._closed = generation
                page.set_closed_generation(generation)
            old = {inode for inode, opened in self._store_sockets.values() if opened <= generation}
            self.changed.notify_all()
        shutdown_sockets(old)
        self._abort_built(generation)
        self._abort_half_built(generation)

    def reset_generations(self) -> None:
        """For a process that starts over as another rank."""
        with self.changed:
            self._opened = 0

    # ---- handles ----

    def add(self, handle: Handle) -> None:
        with self.changed:
            self._handles = [known for known in self._handles if known() is not None]
            self._handles.append(weakref.ref(handle))

    def handles(self) -> list[Any]:
        """Alive and not shut down, in order of creation."""
        with self.changed:
            alive = [handle for known in self._handles if (handle := known()) is not None]
        return [handle for handle in alive if not handle.is_shut_down]

    def bury(self, communicator: Any) -> None:
        with self.changed:
            self._grave.append(communicator)

    def reap(self) -> int:
        """Release aborted communicators; joins gloo's threads, so it may take long."""
        with self.changed:
            released, self._grave = self._grave, []
        return len(released)

    # ---- blocked calls: see [Note: operations that gloo forgets] in csrc/work.h ----

    def add_blocked(self, generation: int, fail: Callable[[], None]) -> int:
        with self.changed:
            self._blocked_count += 1
            self._blocked[self._blocked_count] = (generation, fail)
            return self._blocked_count

    def remove_blocked(self, number: int) -> None:
        with self.changed:
            if self._blocked.pop(number, None) is not None:
                self.changed.notify_all()

    def fail_blocked(self, generation: int) -> None:
        """After a close: give calls of these generations a short grace, then make them fail."""
        with self.changed:
            self.changed.wait_for(lambda: not self._blocked_until(generation), GRACE_S)
            stuck = self._blocked_until(generation)
        for fail in stuck:
            fail()

    def _blocked_until(self, generation: int) -> list[Callable[[], None]]:
        return [fail for opened, fail in self._blocked.values() if opened <= generation]

    # ---- sockets ----

    def add_store_socket(self, fd: int, generation: int) -> None:
        with self.changed:
            if generation <= self._closed:
                raise_aborted("*", generation, "closed while its rendezvous was connected")
            self._store_sockets[fd] = (socket_inode(fd), generation)

    def remove_store_socket(self, fd: int) -> None:
        with self.changed:
            self._store_sockets.pop(fd, None)

    def new_sockets(self, baseline: set[int]) -> set[int]:
        """TCP sockets that appeared since, without those of the rendezvous."""
        with self.changed:
            return tcp_sockets() - baseline - {inode for inode, _ in self._store_sockets.values()}

    def _abort_built(self, generation: int) -> None:
        sockets: set[int] = set()
        for handle in self.handles():
            communicator, owned = handle.take_inner(generation)
            if communicator is not None:
                sockets |= owned
                self.bury(communicator)
        shutdown_sockets(sockets)

    def _abort_half_built(self, generation: int) -> None:
        with self.changed:
            while pending := [build for build in self.builds if build.is_pending(generation)]:
                for build in pending:
                    if build.baseline is not None:
                        shutdown_sockets(self.new_sockets(build.baseline))
                self.changed.wait(_RESCAN_S)


registry = Registry()


class Build:
    """One attempt to build communicators under one generation; see csrc/registry.h."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.baseline: set[int] | None = None
        self._outcome = "running"
        self._is_abandoned = False
        with registry.changed:
            if generation <= registry.closed_generation():
                raise_aborted("*", generation, "closed before its communicators were built")
            registry.builds.append(self)

    def begin(self, handle_name: str) -> None:
        """Sockets that appear from now on until `install` count as that communicator's."""
        with registry.changed:
            if self._is_closed():
                raise_aborted(handle_name, self.generation, "closed while its communicator was built")
            self.baseline = tcp_sockets()

    def install(self, handle: Handle, communicator: Backend) -> None:
        with registry.changed:
            sockets = registry.new_sockets(self.baseline or set())
            self.baseline = None
            if not self._is_closed():
                handle.set_inner(communicator, sockets, self.generation)
                return
        shutdown_sockets(sockets)
        registry.bury(communicator)
        raise_aborted(handle.handle_name, self.generation, "closed while its communicator was built")

    def finish(self, succeeded: bool) -> None:
        with registry.changed:
            self._outcome = "done" if succeeded else "failed"
            self._end()

    def wait(self, timeout_s: float) -> str:
        """One of "running" (timed out), "done", "failed", "closed"."""
        deadline_s = time.monotonic() + timeout_s
        with registry.changed:
            registry.changed.wait_for(
                lambda: self._outcome != "running" or self.generation <= registry.closed_generation(),
                max(0.0, deadline_s - time.monotonic()),
            )
            if self.generation > registry.closed_generation():
                return self._outcome
            registry.changed.wait_for(lambda: self._outcome != "running", GRACE_S)
            if self._outcome == "running":
                self.abandon()
            return "closed"

    def abandon(self) -> None:
        with registry.changed:
            self._is_abandoned = True
            self._end()

    def is_pending(self, generation: int) -> bool:
        return self.generation <= generation and self._outcome == "running" and not self._is_abandoned

    def _is_closed(self) -> bool:
        return self._is_abandoned or self.generation <= registry.closed_generation()

    def _end(self) -> None:
        self.baseline = None
        if self in registry.builds:
            registry.builds.remove(self)
        registry.changed.notify_all()
