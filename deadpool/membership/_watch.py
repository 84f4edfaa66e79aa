"""A watch on etcd that comes back by itself."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

from deadpool.errors import StoreUnavailable
from deadpool.membership._connection import EtcdConnection
from deadpool.membership._rpc import etcdrpc
from deadpool.membership._translate import to_pair
from deadpool.membership.store import (
    KeyDeleted,
    KeyPut,
    MembershipStore,
    Watch,
    WatchCallback,
    WatchConnected,
    WatchEvent,
    WatchInterrupted,
    changes_between,
    prefix_range,
)

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 1.0
_JOIN_EXTRA_S = 1.0


class EtcdWatch(Watch):
    """One watch: lists, follows from the revision after the list, and comes back on another connection.

    It resumes where it stopped, so that a restart of etcd costs no listing by every agent of a large job. It
    lists again if that revision is compacted, or lies in the future: then the server came back with older
    data, and a watch from there would report nothing, without an error.
    """

    def __init__(
        self, store: MembershipStore, connection: EtcdConnection, prefix: str, callback: WatchCallback
    ) -> None:
        self._store = store
        self._connection = connection
        self._prefix = prefix
        self._callback = callback
        self._known: dict[str, int] = {}  # key -> mod revision, as reported
        self._revision = 0  # everything up to here was reported; 0: list first
        self._connected = False
        self._closed = threading.Event()
        self._stream_lock = threading.Lock()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name=f"etcd-watch {prefix}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_running(self) -> bool:
        return not self._closed.is_set()

    def close(self) -> None:
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._connection.config.call_timeout_s + _JOIN_EXTRA_S)

    def stop(self) -> None:
        """Let it end, without waiting."""
        self._closed.set()
        with self._stream_lock:
            if self._stream is not None:
                self._stream.cancel()

    def _run(self) -> None:
        pause_s = _PAUSE_MIN_S
        interrupted = False
        while not self._closed.is_set():
            self._connected = False
            try:
                if self._revision == 0:
                    self._list()
                problem = self._follow()
            except StoreUnavailable as error:
                problem = str(error)
            if self._connected:
                interrupted, pause_s = False, _PAUSE_MIN_S
            if not interrupted:
                interrupted = True
                self._tell(WatchInterrupted(problem=problem))
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _list(self) -> None:
        pairs, revision = self._store.get_prefix(self._prefix)
        for change in changes_between(self._known, pairs, revision):
            self._tell(change)
        self._revision = revision

    def _follow(self) -> str:
        """Report what one stream brings; return why it ended."""
        keys = prefix_range(self._prefix)
        create = etcdrpc.WatchCreateRequest(
            key=keys.start.encode(), range_end=keys.end.encode(), start_revision=self._revision + 1
        )
        with closing(self._connection.stream_watch(create, self._keep_stream)) as answers:
            for answer in answers:
                if answer.compact_revision:
                    self._revision = 0
                    return f"etcd has compacted its history up to revision {answer.compact_revision}"
                if answer.canceled:
                    self._connection.forget_token()  # etcd cancels a watch so if its token has run out
                    return f"etcd cancelled the watch: {answer.cancel_reason}"
                if answer.created:
                    revision = int(answer.header.revision)
                    if revision < self._revision:
                        problem = f"etcd is back with older data (revision {revision}, not {self._revision})"
                        self._revision = 0
                        return problem
                    self._connected = True
                    self._tell(WatchConnected(revision=revision))
                self._report(answer)
        return "etcd ended the watch"

    def _keep_stream(self, stream: Any) -> None:
        with self._stream_lock:
            self._stream = stream
            if self._closed.is_set():
                stream.cancel()

    def _report(self, answer: Any) -> None:
        for event in answer.events:
            key = event.kv.key.decode()
            if event.type == event.DELETE:
                self._known.pop(key, None)
                self._tell(KeyDeleted(key=key, revision=int(event.kv.mod_revision)))
            else:
                self._known[key] = int(event.kv.mod_revision)
                self._tell(KeyPut(pair=to_pair(event.kv)))
        if answer.events:
            # Only now: the changes of one revision come in one answer, and are not reported by halves.
            self._revision = max(self._revision, int(answer.events[-1].kv.mod_revision))

    def _tell(self, event: WatchEvent) -> None:
        if not self._closed.is_set():
            self._callback(event)
