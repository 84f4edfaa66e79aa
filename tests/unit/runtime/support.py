"""What the tests of the runtime share: members, a main thread to post to, banks with known bytes."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from deadpool.core.types import Member, Name, Phase, View
from deadpool.events import EventLog
from deadpool.membership.memory import MemoryServer, MemoryStore
from deadpool.membership.records import JobClaim
from deadpool.membership.registry import Registry
from deadpool.membership.store import Lease
from deadpool.store.segment import Segment, SegmentLayout

WAIT_S = 10.0
LOOPBACK = "127.0.0.1"
TOKEN = "token of the job"
LAYOUT = SegmentLayout(once_bytes=512, blob_capacity=256, unique_bytes=5000, replicated_bytes=3000)


class Loop:
    """Plays the agent's main thread: what is posted runs when the test waits for something."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self.n_run = 0

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._queue.put((function, arguments))

    def run_until(self, is_true: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_true():
            try:
                function, arguments = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not within {WAIT_S} s: {what}") from None
            function(*arguments)
            self.n_run += 1

    def run_posted(self) -> None:
        """Run what is there now."""
        while not self._queue.empty():
            function, arguments = self._queue.get()
            function(*arguments)
            self.n_run += 1


def fail(what: str, error: Exception) -> None:
    """For a writer of which no error is expected."""
    raise AssertionError(what) from error


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for a state that nothing announces."""
    pause = threading.Event()
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}"
        pause.wait(0.005)


def make_member(id: str, control_port: int = 0, *, nproc: int = 1) -> Member:
    return Member(
        id=id,
        host=f"host-{id}",
        address=LOOPBACK,
        control_port=control_port,
        data_port=0,
        rendezvous_port=0,
        nproc=nproc,
    )


def make_view(
    slots: Sequence[str],
    phase: Phase = Phase.RUNNING,
    *,
    generation: int = 1,
    nproc: int = 1,
    holders: tuple[tuple[int, ...], ...] | None = None,
    rollback: Name | None = None,
) -> View:
    """A View in which every slot is held by the next one."""
    count = len(slots)
    ring = tuple(((slot + 1) % count,) for slot in range(count))
    return View(
        generation=generation,
        phase=phase,
        slots=tuple(slots),
        nproc=nproc,
        rollback=rollback,
        rendezvous=slots[0],
        holders=ring if holders is None else holders,
        reason="The test says so.",
    )


class Job:
    """A job's records in memory, with members that have leases."""

    def __init__(self, *ids: str, ttl_s: float = 60.0) -> None:
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self.registry = Registry(self.store, "job")
        self.members = {id: make_member(id) for id in ids}
        self.leases: dict[str, Lease] = {}
        claim = JobClaim(run_id="run", token=TOKEN, n_members=len(ids), claimed_by="the test")
        self.store.put(self.registry.job_key, msgspec.json.encode(claim))
        for id in ids:
            self.leases[id] = self.store.lease_grant(ttl_s)
            self.registry.register(self.members[id], self.leases[id], TOKEN)

    def view(self) -> View:
        view, _ = self.registry.view()
        assert view is not None, "no View was published"
        return view


def open_log(path: Path) -> EventLog:
    """A log that refuses names and values which are not in the catalogue."""
    return EventLog(path, "run", "test", strict=True)


def read_events(path: Path, name: str = "") -> list[dict[str, Any]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if not name or event["event"] == name]


def pattern(length: int, *seed: object) -> bytes:
    return random.Random(repr(seed)).randbytes(length)


def fill(segment: Segment, bank: int, name: Name) -> None:
    """Capture `name` into a bank, as a worker does; its bytes follow from the name."""
    segment.begin(bank, name)
    blob = pattern(100 + name.step, "blob", name)
    segment.blob_view(bank)[: len(blob)] = blob
    for area, view in (("unique", segment.unique_view(bank)), ("replicated", segment.replicated_view(bank))):
        view[:] = pattern(len(view), area, name)
    segment.complete(bank, blob_len=len(blob))
