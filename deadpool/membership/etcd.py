"""The membership store on etcd. How it is reached and what that must survive: `_connection.py`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from deadpool.errors import LeaseLost, StoreUnavailable
from deadpool.membership._connection import EtcdConfig, EtcdConnection, RefusedByStore, Rpc, parse_endpoints
from deadpool.membership._rpc import etcdrpc
from deadpool.membership._translate import (
    to_compare,
    to_delete_request,
    to_pair,
    to_put_request,
    to_range_request,
)
from deadpool.membership._watch import EtcdWatch
from deadpool.membership.store import (
    Compare,
    KeyRange,
    KeyValue,
    Lease,
    LeaseId,
    MembershipStore,
    Watch,
    WatchCallback,
    Write,
    prefix_range,
)

__all__ = ["UNSAFE_VERSIONS", "EtcdConfig", "EtcdStore", "parse_endpoints"]

UNSAFE_VERSIONS = ("3.5.0", "3.5.1", "3.5.2")
"""Versions that can lose consistency when a server is killed (etcd-io/etcd#13766)."""

_PROBE_KEY = "/deadpool/"
_CONNECT_S = 2.0  # a command that needs etcd must fail within 3 s, its own start included


class EtcdStore(MembershipStore):
    """A client of an etcd cluster. Constructing it opens nothing; `connect` does."""

    def __init__(self, config: EtcdConfig) -> None:
        self._connection = EtcdConnection(config)
        self._lock = threading.Lock()
        self._watches: list[EtcdWatch] = []
        self._server_version = ""

    @property
    def server_version(self) -> str:
        """Version of the server that answered `connect`."""
        return self._server_version

    @property
    def version_warning(self) -> str:
        """What to tell the operator about that version; empty if there is nothing to say."""
        if self._server_version not in UNSAFE_VERSIONS:
            return ""
        return (
            f"etcd {self._server_version} can lose consistency when a server is killed (etcd-io/etcd#13766); "
            "use 3.5.6 or newer, or 3.4.22 or newer"
        )

    def connect(self, timeout_s: float | None = None) -> None:
        """Reach the store; `timeout_s` is for callers that have more time, or less, than a command has."""
        self._connection.config.check()

        def probe(rpc: Rpc) -> str:
            rpc.kv.Range(to_range_request(KeyRange(start=_PROBE_KEY)))  # linearizable: proves a quorum
            return str(rpc.maintenance.Status(etcdrpc.StatusRequest()).version)

        timeout_s = timeout_s or min(_CONNECT_S, self._connection.config.call_timeout_s)
        self._server_version = self._connection.call("connect", probe, timeout_s=timeout_s)

    def close(self) -> None:
        with self._lock:
            watches, self._watches = self._watches, []
        for watch in watches:
            watch.stop()
        self._connection.close()  # ends what the watches wait for
        for watch in watches:
            watch.close()

    def get(self, key: str) -> KeyValue | None:
        request = to_range_request(KeyRange(start=key))
        answer = self._connection.call(f"get {key}", lambda rpc: rpc.kv.Range(request))
        return to_pair(answer.kvs[0]) if answer.kvs else None

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        request = to_range_request(prefix_range(prefix))
        answer = self._connection.call(f"get {prefix}*", lambda rpc: rpc.kv.Range(request))
        return [to_pair(pair) for pair in answer.kvs], int(answer.header.revision)

    def put(self, key: str, value: bytes, lease: LeaseId = 0) -> int:
        request = to_put_request(Write(key=key, value=value, lease=lease))
        answer = self._call_with_lease(f"put {key}", lambda rpc: rpc.kv.Put(request))
        return int(answer.header.revision)

    def transaction(
        self,
        compares: Sequence[Compare],
        writes: Sequence[Write] = (),
        deletes: Sequence[KeyRange] = (),
    ) -> int | None:
        puts = [etcdrpc.RequestOp(request_put=to_put_request(write)) for write in writes]
        gone = [etcdrpc.RequestOp(request_delete_range=to_delete_request(keys)) for keys in deletes]
        request = etcdrpc.TxnRequest(
            compare=[to_compare(compare) for compare in compares], success=[*puts, *gone]
        )
        keys = ", ".join([write.key for write in writes] + [each.start for each in deletes])
        answer = self._call_with_lease(f"change {keys}", lambda rpc: rpc.kv.Txn(request), repeatable=False)
        return int(answer.header.revision) if answer.succeeded else None

    def delete(self, key: str) -> bool:
        return self._delete(KeyRange(start=key)) > 0

    def delete_prefix(self, prefix: str) -> int:
        return self._delete(prefix_range(prefix))

    def lease_grant(self, ttl_s: float) -> Lease:
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        answer = self._connection.call("grant a lease", lambda rpc: rpc.lease.LeaseGrant(request))
        return Lease(id=int(answer.ID), granted_ttl_s=float(answer.TTL))

    def lease_keepalive(self, lease: LeaseId) -> float:
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease)

        def renew_once(rpc: Rpc) -> Any:
            return next(rpc.lease.LeaseKeepAlive(iter([request])), None)

        answer = self._connection.call("renew a lease", renew_once)
        if answer is None:
            raise StoreUnavailable("etcd closed the renewal of a lease without an answer; try again")
        return max(0.0, float(answer.TTL))

    def lease_remaining_s(self, lease: LeaseId) -> float:
        request = etcdrpc.LeaseTimeToLiveRequest(ID=lease)
        answer = self._connection.call("read a lease", lambda rpc: rpc.lease.LeaseTimeToLive(request))
        return max(0.0, float(answer.TTL))

    def lease_revoke(self, lease: LeaseId) -> None:
        request = etcdrpc.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(RefusedByStore):  # it has ended, which is what was wanted
            self._connection.call("revoke a lease", lambda rpc: rpc.lease.LeaseRevoke(request))

    def watch(self, prefix: str, callback: WatchCallback) -> Watch:
        watch = EtcdWatch(self, self._connection, prefix, callback)
        with self._lock:
            self._watches = [*(each for each in self._watches if each.is_running()), watch]
        watch.start()
        return watch

    def _delete(self, keys: KeyRange) -> int:
        request = to_delete_request(keys)
        answer = self._connection.call(f"delete {keys.start}", lambda rpc: rpc.kv.DeleteRange(request))
        return int(answer.deleted)

    def _call_with_lease(self, action: str, send: Callable[[Rpc], Any], *, repeatable: bool = True) -> Any:
        try:
            return self._connection.call(action, send, repeatable=repeatable)
        except RefusedByStore as error:
            raise LeaseLost(f"{action}: {error}") from error
