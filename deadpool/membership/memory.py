"""A membership store in memory, with a clock moved by hand: for tests and simulations.

`MemoryServer` is what etcd is to a real job; each `MemoryStore` is one client of it. Nothing here reads a
clock or starts a thread: with one calling thread every run is the same. Callbacks of watches run inside the
call that caused the change, after it is complete, in order.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from deadpool.errors import LeaseLost, StoreUnavailable
from deadpool.membership.store import (
    Compare,
    KeyDeleted,
    KeyPut,
    KeyRange,
    KeyValue,
    Lease,
    LeaseId,
    MembershipStore,
    Operator,
    Target,
    Watch,
    WatchCallback,
    WatchConnected,
    WatchEvent,
    WatchInterrupted,
    Write,
    changes_between,
    prefix_range,
)

_CALLBACK_END_S = 2.0
_CUT_OFF = "this client of the memory server is cut off"


@dataclass(slots=True)
class _LeaseState:
    granted_ttl_s: float
    ends_s: float


@dataclass(slots=True)
class _MemoryWatch(Watch):
    server: MemoryServer
    prefix: str
    callback: WatchCallback
    known: dict[str, int] = field(default_factory=dict)
    seen_revision: int = 0
    connected: bool = False
    closed: bool = False

    def close(self) -> None:
        self.server._end_watch(self)


class MemoryServer:
    """The state that all clients share, and its clock."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._now_s = 0.0
        self._revision = 1
        self._pairs: dict[str, KeyValue] = {}
        self._leases: dict[LeaseId, _LeaseState] = {}
        self._next_lease: LeaseId = 1
        self._history: list[KeyPut | KeyDeleted] = []
        self._compacted_revision = 0
        self._watches: list[_MemoryWatch] = []
        self._outbox: deque[tuple[_MemoryWatch, WatchEvent]] = deque()
        self._delivering: tuple[threading.Thread, _MemoryWatch] | None = None

    @property
    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock; leases that end on the way end, in order."""
        with self._lock:
            self._now_s += seconds
            ended = [
                (state.ends_s, lease) for lease, state in self._leases.items() if state.ends_s <= self._now_s
            ]
            for _, lease in sorted(ended):
                self._end_lease(lease)
        self._deliver()

    def compact(self) -> None:
        """Forget the history: a watch that was cut off must list again."""
        with self._lock:
            self._history.clear()
            self._compacted_revision = self._revision

    def _apply(self, writes: Sequence[Write], deletes: Sequence[KeyRange]) -> tuple[int, int]:
        """Apply one change at one revision; return (revision, keys deleted)."""
        for write in writes:
            if write.lease and write.lease not in self._leases:
                raise LeaseLost(f"lease {write.lease:x} has ended; {write.key} was not written")
        doomed = [key for key in sorted(self._pairs) for each in deletes if _is_inside(key, each)]
        if not writes and not doomed:
            return self._revision, 0
        self._revision += 1
        for key in doomed:
            if self._pairs.pop(key, None) is not None:
                self._report(KeyDeleted(key=key, revision=self._revision), key)
        for write in writes:
            before = self._pairs.get(write.key)
            pair = KeyValue(
                key=write.key,
                value=write.value,
                create_revision=before.create_revision if before else self._revision,
                mod_revision=self._revision,
                lease=write.lease,
            )
            self._pairs[write.key] = pair
            self._report(KeyPut(pair=pair), write.key)
        return self._revision, len(doomed)

    def _end_lease(self, lease: LeaseId) -> None:
        if self._leases.pop(lease, None) is not None:
            keys = [key for key, pair in self._pairs.items() if pair.lease == lease]
            self._apply((), [KeyRange(start=key) for key in keys])

    def _report(self, event: KeyPut | KeyDeleted, key: str) -> None:
        self._history.append(event)
        for watch in self._watches:
            if watch.connected and key.startswith(watch.prefix):
                self._tell(watch, event)

    def _tell(self, watch: _MemoryWatch, event: KeyPut | KeyDeleted) -> None:
        match event:
            case KeyPut(pair=pair):
                watch.known[pair.key] = pair.mod_revision
                watch.seen_revision = pair.mod_revision
            case KeyDeleted(key=key, revision=revision):
                watch.known.pop(key, None)
                watch.seen_revision = revision
            case _:
                assert_never(event)
        self._outbox.append((watch, event))

    def _connect_watch(self, watch: _MemoryWatch) -> None:
        watch.connected = True
        connected = WatchConnected(revision=self._revision)
        if watch.seen_revision == 0 or watch.seen_revision < self._compacted_revision:
            pairs = [pair for key, pair in sorted(self._pairs.items()) if key.startswith(watch.prefix)]
            for change in changes_between(watch.known, pairs, self._revision):
                self._outbox.append((watch, change))
            watch.seen_revision = self._revision
            self._outbox.append((watch, connected))
            return
        self._outbox.append((watch, connected))
        for event in self._history:
            key, revision = _key_and_revision(event)
            if revision > watch.seen_revision and key.startswith(watch.prefix):
                self._outbox.append((watch, event))
                watch.known[key] = revision
                if isinstance(event, KeyDeleted):
                    watch.known.pop(key)
        watch.seen_revision = self._revision

    def _begin_watch(self, watch: _MemoryWatch, is_reachable: bool) -> None:
        with self._lock:
            self._watches.append(watch)
            if is_reachable:
                self._connect_watch(watch)
            else:
                self._outbox.append((watch, WatchInterrupted(problem=_CUT_OFF)))
        self._deliver()

    def _set_reachable(self, watches: Sequence[_MemoryWatch], is_reachable: bool) -> None:
        with self._lock:
            for watch in watches:
                if is_reachable:
                    self._connect_watch(watch)
                else:
                    watch.connected = False
                    self._outbox.append((watch, WatchInterrupted(problem=_CUT_OFF)))
        self._deliver()

    def _end_watch(self, watch: _MemoryWatch) -> None:
        with self._lock:
            watch.closed = True
            if watch in self._watches:
                self._watches.remove(watch)
            self._lock.wait_for(lambda: not self._is_running_elsewhere(watch), _CALLBACK_END_S)

    def _is_running_elsewhere(self, watch: _MemoryWatch) -> bool:
        if self._delivering is None:
            return False
        thread, running = self._delivering
        return running is watch and thread is not threading.current_thread()

    def _deliver(self) -> None:
        # One thread at a time delivers; a change made inside a callback, or by another thread, is queued
        # behind.
        while True:
            with self._lock:
                if self._delivering is not None or not self._outbox:
                    return
                watch, event = self._outbox.popleft()
                if watch.closed:
                    continue
                self._delivering = (threading.current_thread(), watch)
            try:
                watch.callback(event)
            finally:
                with self._lock:
                    self._delivering = None
                    self._lock.notify_all()


class MemoryStore(MembershipStore):
    """One client of a MemoryServer."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._watches: list[_MemoryWatch] = []
        self._is_reachable = True
        self._is_closed = False

    def set_reachable(self, is_reachable: bool) -> None:
        """Cut this client off from the server, or let it back."""
        if is_reachable != self._is_reachable:
            self._is_reachable = is_reachable
            self._server._set_reachable(self._watches, is_reachable)

    def connect(self) -> None:
        self._check_reachable("connect")

    def close(self) -> None:
        self._is_closed = True
        while self._watches:
            self._watches.pop().close()

    def get(self, key: str) -> KeyValue | None:
        with self._server._lock:
            self._check_reachable(f"get {key}")
            return self._server._pairs.get(key)

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        server = self._server
        with server._lock:
            self._check_reachable(f"get {prefix}*")
            pairs = [pair for key, pair in sorted(server._pairs.items()) if key.startswith(prefix)]
            return pairs, server._revision

    def put(self, key: str, value: bytes, lease: LeaseId = 0) -> int:
        return self._change(f"put {key}", writes=[Write(key=key, value=value, lease=lease)])[0]

    def transaction(
        self,
        compares: Sequence[Compare],
        writes: Sequence[Write] = (),
        deletes: Sequence[KeyRange] = (),
    ) -> int | None:
        server = self._server
        with server._lock:
            self._check_reachable("transaction")
            if not all(_holds(compare, server._pairs) for compare in compares):
                return None
            revision, _ = server._apply(writes, deletes)
        server._deliver()
        return revision

    def delete(self, key: str) -> bool:
        return self._change(f"delete {key}", deletes=[KeyRange(start=key)])[1] > 0

    def delete_prefix(self, prefix: str) -> int:
        return self._change(f"delete {prefix}*", deletes=[prefix_range(prefix)])[1]

    def lease_grant(self, ttl_s: float) -> Lease:
        server = self._server
        with server._lock:
            self._check_reachable("grant a lease")
            lease = server._next_lease
            server._next_lease += 1
            server._leases[lease] = _LeaseState(granted_ttl_s=ttl_s, ends_s=server._now_s + ttl_s)
            return Lease(id=lease, granted_ttl_s=ttl_s)

    def lease_keepalive(self, lease: LeaseId) -> float:
        server = self._server
        with server._lock:
            self._check_reachable("renew a lease")
            state = server._leases.get(lease)
            if state is None:
                return 0.0
            state.ends_s = server._now_s + state.granted_ttl_s
            return state.granted_ttl_s

    def lease_remaining_s(self, lease: LeaseId) -> float:
        server = self._server
        with server._lock:
            self._check_reachable("read a lease")
            state = server._leases.get(lease)
            return math.floor(state.ends_s - server._now_s) if state else 0.0  # whole seconds, as etcd

    def lease_revoke(self, lease: LeaseId) -> None:
        with self._server._lock:
            self._check_reachable("revoke a lease")
            self._server._end_lease(lease)
        self._server._deliver()

    def watch(self, prefix: str, callback: WatchCallback) -> Watch:
        watch = _MemoryWatch(server=self._server, prefix=prefix, callback=callback)
        self._watches.append(watch)
        self._server._begin_watch(watch, self._is_reachable)
        return watch

    def _check_reachable(self, action: str) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"this client of the memory server is closed ({action})")
        if not self._is_reachable:
            raise StoreUnavailable(f"{_CUT_OFF} ({action}); let it back with set_reachable(True)")

    def _change(
        self, action: str, writes: Sequence[Write] = (), deletes: Sequence[KeyRange] = ()
    ) -> tuple[int, int]:
        with self._server._lock:
            self._check_reachable(action)
            changed = self._server._apply(writes, deletes)
        self._server._deliver()
        return changed


def _is_inside(key: str, keys: KeyRange) -> bool:
    return keys.start <= key < keys.end if keys.end else key == keys.start


def _key_and_revision(event: KeyPut | KeyDeleted) -> tuple[str, int]:
    if isinstance(event, KeyPut):
        return event.pair.key, event.pair.mod_revision
    return event.key, event.revision


def _holds(compare: Compare, pairs: dict[str, KeyValue]) -> bool:
    if not compare.whole_prefix:
        return _compare_one(compare, pairs.get(compare.key))
    inside = [pair for key, pair in pairs.items() if key.startswith(compare.key)]
    if not inside:
        return _compare_one(compare, None)
    return all(_compare_one(compare, pair) for pair in inside)


def _compare_one(compare: Compare, pair: KeyValue | None) -> bool:
    found: int | bytes
    match compare.target:
        case Target.CREATE_REVISION:
            found = pair.create_revision if pair else 0
        case Target.MOD_REVISION:
            found = pair.mod_revision if pair else 0
        case Target.VALUE:
            if pair is None:
                return False
            found = pair.value
        case _:
            assert_never(compare.target)
    if compare.operator is Operator.EQUAL:
        return found == compare.expected
    # Only revisions are ordered; a value is compared for equality.
    return isinstance(found, int) and isinstance(compare.expected, int) and found > compare.expected
