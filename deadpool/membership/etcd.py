"""The membership store on etcd.

[Note: what this client must survive]
    - A dead endpoint: each call goes to the endpoint that answered last, and on to the next one when it
      fails.
    - An answer that never came: a call that may have been applied is repeated only if repeating it is
      harmless. A transaction is not, so it raises and the caller reads back (see `registry.py`).
    - A server that is frozen: every call has a deadline, and gRPC pings an idle connection. A ping is only
      noticed to be lost with BOTH keepalive options and `ping_timeout_ms` (measured: 6 s / 2 s notices within
      8 s). etcd drops clients that ping more often than each 5 s, unless it runs with
      --grpc-keepalive-min-time.
    - A reconnect: gRPC waits up to 120 s between attempts by itself; here at most 1 s.
    - A member cut off from its leader: watches carry `hasleader`, so that the server ends them.
    - Tokens that run out (5 min by default) or are forgotten by a restart: a refused call authenticates anew,
      once. A watch with an old token is "created" and cancelled in one message, without an error: such a
      message is an error here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deadpool.errors import ConfigError, LeaseLost, StoreUnavailable
from deadpool.membership._rpc import etcdrpc, grpc
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
    WatchInterrupted,
    Write,
    changes_between,
    prefix_range,
)

DEFAULT_PORT = 2379
UNSAFE_VERSIONS = ("3.5.0", "3.5.1", "3.5.2")
"""Versions that can lose consistency when a server is killed (etcd-io/etcd#13766)."""

_MAX_MESSAGE_BYTES = 64 << 20
_RETRY_PAUSE_S = 0.05
_WATCH_PAUSE_MAX_S = 1.0
_JOIN_S = 3.0
_PROBE_KEY = "/deadpool/"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """How to reach etcd.

    Attributes:
        endpoints: `host:port` of each server; see `parse_endpoints`.
        ca_file: certificate of the authority that signed the servers'; set it to use TLS.
        cert_file: own certificate, for servers that ask for one.
        key_file: key of that certificate.
        user: user name, with `password`; both or neither. Works with and without TLS.
        password: password of that user.
        call_timeout_s: deadline of every call, with all its repetitions.
        keepalive_s: how long a connection may be silent before it is pinged. Below 5 s only for a server that
            allows it.
        keepalive_timeout_s: how long a ping may remain unanswered.
    """

    endpoints: tuple[str, ...]
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password: str | None = None
    call_timeout_s: float = 3.0
    keepalive_s: float = 6.0
    keepalive_timeout_s: float = 2.0


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Read a list like `a,b:2379,[::1]:2379`; a missing port is 2379.

    Raises:
        ConfigError: naming every part that cannot be used.
    """
    endpoints: list[str] = []
    problems: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        plain = part.removeprefix("http://").removeprefix("https://").rstrip("/")
        host, port = _split_port(plain)
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            problems.append(f"etcd endpoint {part!r} is not HOST or HOST:PORT (in {text!r})")
        else:
            endpoints.append(f"{host}:{port}")
    if problems:
        raise ConfigError(problems)
    return tuple(dict.fromkeys(endpoints))


def _split_port(text: str) -> tuple[str, str]:
    if text.startswith("["):  # IPv6
        host, bracket, rest = text.partition("]")
        port = rest.removeprefix(":") if rest else str(DEFAULT_PORT)
        return (host + bracket if bracket and host != "[" else ""), port
    host, colon, port = text.partition(":")
    return host, port if colon else str(DEFAULT_PORT)


class _RefusedByStore(Exception):
    """The store answered, and said no in a way that the called method understands."""

    def __init__(self, code: Any, details: str) -> None:
        self.code = code
        super().__init__(details)


class EtcdStore(MembershipStore):
    """A client of an etcd cluster. Constructing it opens nothing; `connect` does."""

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._channels: dict[str, Any] = {}  # endpoint -> channel, made at first use
        self._current = 0  # index of the endpoint that answered last
        self._token: str | None = None
        self._closed = threading.Event()
        self._watches: list[_EtcdWatch] = []
        self.server_version = ""

    def connect(self) -> None:
        problems = _check_config(self._config)
        if problems:
            raise ConfigError(problems)
        self.get(_PROBE_KEY)  # a linearizable read: proves a quorum, not only a listening port
        self.server_version = self._call(
            "read the version", lambda rpc: str(rpc.maintenance.Status(etcdrpc.StatusRequest()).version)
        )

    @property
    def version_warning(self) -> str:
        """What to tell the operator about the server's version; empty if there is nothing to say."""
        if self.server_version not in UNSAFE_VERSIONS:
            return ""
        return (
            f"etcd {self.server_version} can lose consistency when a server is killed (etcd-io/etcd#13766); "
            "use 3.5.6 or newer, or 3.4.22 or newer"
        )

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            watches, self._watches = self._watches, []
        for watch in watches:
            watch.close()
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def get(self, key: str) -> KeyValue | None:
        request = etcdrpc.RangeRequest(key=key.encode())
        pairs = self._call(f"get {key}", lambda rpc: rpc.kv.Range(request)).kvs
        return _to_pair(pairs[0]) if pairs else None

    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        request = _range_request(etcdrpc.RangeRequest, prefix_range(prefix))
        answer = self._call(f"get {prefix}*", lambda rpc: rpc.kv.Range(request))
        return [_to_pair(pair) for pair in answer.kvs], int(answer.header.revision)

    def put(self, key: str, value: bytes, lease: LeaseId = 0) -> int:
        request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease)
        answer = self._call_with_lease(f"put {key}", lambda rpc: rpc.kv.Put(request))
        return int(answer.header.revision)

    def transaction(
        self,
        compares: Sequence[Compare],
        writes: Sequence[Write] = (),
        deletes: Sequence[KeyRange] = (),
    ) -> int | None:
        request = etcdrpc.TxnRequest(
            compare=[_to_compare(compare) for compare in compares],
            success=[
                *(
                    etcdrpc.RequestOp(
                        request_put=etcdrpc.PutRequest(
                            key=write.key.encode(), value=write.value, lease=write.lease
                        )
                    )
                    for write in writes
                ),
                *(
                    etcdrpc.RequestOp(request_delete_range=_range_request(etcdrpc.DeleteRangeRequest, keys))
                    for keys in deletes
                ),
            ],
        )
        keys = ", ".join([write.key for write in writes] + [each.start for each in deletes])
        answer = self._call_with_lease(
            f"transaction on {keys}", lambda rpc: rpc.kv.Txn(request), repeatable=False
        )
        return int(answer.header.revision) if answer.succeeded else None

    def delete(self, key: str) -> bool:
        return self._delete(KeyRange(start=key)) > 0

    def delete_prefix(self, prefix: str) -> int:
        return self._delete(prefix_range(prefix))

    def lease_grant(self, ttl_s: float) -> Lease:
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, round(ttl_s + 0.499)))
        answer = self._call("grant a lease", lambda rpc: rpc.lease.LeaseGrant(request))
        return Lease(id=int(answer.ID), granted_ttl_s=float(answer.TTL))

    def lease_keepalive(self, lease: LeaseId) -> float:
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease)
        answer = self._call(
            "renew a lease", lambda rpc: next(iter(rpc.lease.LeaseKeepAlive(iter([request]))))
        )
        return max(0.0, float(answer.TTL))

    def lease_remaining_s(self, lease: LeaseId) -> float:
        request = etcdrpc.LeaseTimeToLiveRequest(ID=lease)
        answer = self._call("read a lease", lambda rpc: rpc.lease.LeaseTimeToLive(request))
        return max(0.0, float(answer.TTL))

    def lease_revoke(self, lease: LeaseId) -> None:
        request = etcdrpc.LeaseRevokeRequest(ID=lease)
        try:
            self._call("revoke a lease", lambda rpc: rpc.lease.LeaseRevoke(request))
        except _RefusedByStore:
            pass  # not found: it has ended, which is what was wanted

    def watch(self, prefix: str, callback: WatchCallback) -> Watch:
        watch = _EtcdWatch(self, prefix, callback)
        with self._lock:
            self._watches.append(watch)
        watch.start()
        return watch

    def _delete(self, keys: KeyRange) -> int:
        request = _range_request(etcdrpc.DeleteRangeRequest, keys)
        answer = self._call(f"delete {keys.start}", lambda rpc: rpc.kv.DeleteRange(request))
        return int(answer.deleted)

    def _call_with_lease(self, action: str, send: Callable[[_Rpc], Any], repeatable: bool = True) -> Any:
        try:
            return self._call(action, send, repeatable)
        except _RefusedByStore as error:
            raise LeaseLost(f"{action}: {error}") from error

    def _call(self, action: str, send: Callable[[_Rpc], _T], repeatable: bool = True) -> _T:
        """Send one request, to the next endpoint if one fails, until it is answered or the deadline is
        over."""
        deadline_s = time.monotonic() + self._config.call_timeout_s
        attempt_s = self._config.call_timeout_s / len(self._config.endpoints)
        attempts = 0
        fresh_token = False
        while True:
            index = self._current
            left_s = deadline_s - time.monotonic()
            try:
                return send(self._rpc(index, min(left_s, attempt_s)))
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
                problem: Exception = error
            attempts += 1
            left_s = deadline_s - time.monotonic()
            if _is_old_token(code, details) and self._config.user is not None and not fresh_token:
                self._token, fresh_token = None, True
                continue
            if code is grpc.StatusCode.NOT_FOUND:
                raise _RefusedByStore(code, details) from problem
            maybe_applied = not repeatable and not _was_not_sent(code, details)
            if code not in _MOVE_ON or maybe_applied or left_s <= 0 or self._closed.is_set():
                raise self._unavailable(action, index, code, details) from problem
            self._move_on(index)
            if attempts % len(self._config.endpoints) == 0:
                self._closed.wait(min(_RETRY_PAUSE_S, max(0.0, left_s)))

    def _rpc(self, index: int, timeout_s: float) -> _Rpc:
        """The stubs of one endpoint, with deadline and token set."""
        channel = self._channel(index)
        if self._config.user is not None and self._token is None:
            request = etcdrpc.AuthenticateRequest(name=self._config.user, password=self._config.password)
            self._token = str(etcdrpc.AuthStub(channel).Authenticate(request, timeout=timeout_s).token)
        return _Rpc(channel=channel, timeout_s=timeout_s, metadata=self._metadata())

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        # As plain metadata, not as call credentials: those are refused on a connection without TLS.
        return (("token", self._token),) if self._token else ()

    def _channel(self, index: int) -> Any:
        endpoint = self._config.endpoints[index]
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailable("this connection to etcd is closed")
            if endpoint not in self._channels:
                self._channels[endpoint] = _open_channel(endpoint, self._config)
            return self._channels[endpoint]

    def _move_on(self, index: int) -> None:
        with self._lock:
            if self._current == index:
                self._current = (index + 1) % len(self._config.endpoints)

    def _forget_watch(self, watch: _EtcdWatch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def _unavailable(self, action: str, index: int, code: Any, details: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"etcd at {','.join(self._config.endpoints)} cannot be used ({action}; last asked "
            f"{self._config.endpoints[index]}: {code.name.lower().replace('_', ' ')}, {details}). {_remedy(code, details)}"
        )


class _Rpc:
    """Stubs of one endpoint whose every call carries a deadline and the token."""

    def __init__(self, channel: Any, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> None:
        self.channel = channel
        self.kv = _Bound(etcdrpc.KVStub(channel), timeout_s, metadata)
        self.lease = _Bound(etcdrpc.LeaseStub(channel), timeout_s, metadata)
        self.maintenance = _Bound(etcdrpc.MaintenanceStub(channel), timeout_s, metadata)


class _Bound:
    def __init__(self, stub: Any, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub, self._timeout_s, self._metadata = stub, timeout_s, metadata

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        send = getattr(self._stub, method)
        return lambda request: send(request, timeout=self._timeout_s, metadata=self._metadata)


class _EtcdWatch(Watch):
    """One watch: lists, follows from the revision after the list, and comes back on another connection.

    It resumes where it stopped, so that a restart of etcd costs no listing by every agent of a large job. It
    lists again if that revision is compacted, or lies in the future: then the server came back with older
    data, and a watch from there would silently report nothing.
    """

    def __init__(self, store: EtcdStore, prefix: str, callback: WatchCallback) -> None:
        self._store = store
        self._prefix = prefix
        self._callback = callback
        self._known: dict[str, int] = {}
        self._revision = 0  # everything up to here was reported; 0: list first
        self._interrupted = False
        self._closed = threading.Event()
        self._stream_lock = threading.Lock()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name=f"etcd-watch {prefix}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with self._stream_lock:
            if self._stream is not None:
                self._stream.cancel()
        self._store._forget_watch(self)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        pause_s = _RETRY_PAUSE_S
        while not self._closed.is_set():
            index = self._store._current
            connected = False
            try:
                if self._revision == 0:
                    self._list()
                for answer in self._follow(index):
                    if answer.created and not answer.canceled:
                        if answer.header.revision < self._revision:
                            self._revision = 0
                            problem = "etcd came back with older data"
                            break
                        connected, pause_s = True, _RETRY_PAUSE_S
                        self._interrupted = False
                        self._tell(WatchConnected(revision=int(answer.header.revision)))
                    if answer.canceled:
                        if answer.compact_revision:
                            self._revision = 0
                        else:
                            self._store._token = None  # a watch is cancelled so if its token has run out
                        problem = answer.cancel_reason or "etcd compacted its history"
                        break
                    self._report(answer)
                else:
                    problem = "etcd ended the watch"
            except grpc.RpcError as error:
                problem = f"{error.code().name.lower()}: {error.details()}"
                self._store._move_on(index)
            except StoreUnavailable as error:
                problem = str(error)
            if self._closed.is_set():
                return
            if not self._interrupted:
                self._interrupted = True
                self._tell(WatchInterrupted(problem=problem))
            if not connected:
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _WATCH_PAUSE_MAX_S)

    def _list(self) -> None:
        pairs, revision = self._store.get_prefix(self._prefix)
        for change in changes_between(self._known, pairs, revision):
            self._tell(change)
        self._revision = revision

    def _follow(self, index: int) -> Iterator[Any]:
        """Yield the answers of one stream."""
        create = _range_request(etcdrpc.WatchCreateRequest, prefix_range(self._prefix))
        create.start_revision = self._revision + 1
        ended = threading.Event()

        def requests() -> Iterator[Any]:
            yield etcdrpc.WatchRequest(create_request=create)
            ended.wait()  # the stream lives as long as its requests do not end

        rpc = self._store._rpc(index, self._store._config.call_timeout_s)
        metadata = (*self._store._metadata(), ("hasleader", "true"))
        stream = etcdrpc.WatchStub(rpc.channel).Watch(requests(), metadata=metadata)
        with self._stream_lock:
            self._stream = stream
            if self._closed.is_set():
                stream.cancel()
        try:
            yield from stream
        finally:
            ended.set()
            stream.cancel()
            with self._stream_lock:
                self._stream = None

    def _report(self, answer: Any) -> None:
        for event in answer.events:
            key = event.kv.key.decode()
            if event.type == event.DELETE:
                self._known.pop(key, None)
                self._tell(KeyDeleted(key=key, revision=int(event.kv.mod_revision)))
            else:
                self._known[key] = int(event.kv.mod_revision)
                self._tell(KeyPut(pair=_to_pair(event.kv)))
        # Only now: a change of several keys at one revision comes in one answer, and is not reported by
        # halves.
        self._revision = max(self._revision, int(answer.header.revision))

    def _tell(self, event: Any) -> None:
        if not self._closed.is_set():
            self._callback(event)


_MOVE_ON = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)
"""Answers after which another endpoint, or another try, may do better."""


def _was_not_sent(code: Any, details: str) -> bool:
    """Whether a failed request surely never reached a server. In doubt: no."""
    return code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect to all addresses")


def _is_old_token(code: Any, details: str) -> bool:
    return code is grpc.StatusCode.UNAUTHENTICATED or "invalid auth token" in details


def _remedy(code: Any, details: str) -> str:
    if "certificate" in details or "SSL" in details or "handshake" in details:
        return "Check the TLS files, and that the certificate names the host that --etcd names."
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED) or "auth" in details:
        return f"Check user and password; the user needs readwrite on the prefix {_PROBE_KEY}."
    if "space" in details:
        return (
            "etcd is out of space: compact and defragment it, then disarm the alarm (etcdctl alarm disarm)."
        )
    return "Check that etcd runs, has a quorum, and that --etcd names its client port."


def _check_config(config: EtcdConfig) -> list[str]:
    problems = []
    if not config.endpoints:
        problems.append("no etcd endpoint is given; use --etcd HOST:PORT[,HOST:PORT...]")
    if (config.user is None) != (config.password is None):
        problems.append("etcd user and password go together; one of them is missing")
    if (config.cert_file is None) != (config.key_file is None):
        problems.append("etcd certificate and key go together; one of them is missing")
    if config.cert_file is not None and config.ca_file is None:
        problems.append("an etcd certificate needs the certificate of the authority (ca) too")
    for path in (config.ca_file, config.cert_file, config.key_file):
        if path is not None and not path.is_file():
            problems.append(f"etcd TLS file {path} does not exist or is not a file")
    return problems


def _open_channel(endpoint: str, config: EtcdConfig) -> Any:
    keepalive_timeout_ms = round(config.keepalive_timeout_s * 1000)
    options = [
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),  # also how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),  # two stores of a process share no connection
        ("grpc.enable_http_proxy", 0),
    ]
    if config.ca_file is None:
        return grpc.insecure_channel(endpoint, options=options)
    own = (config.key_file, config.cert_file)
    credentials = grpc.ssl_channel_credentials(
        config.ca_file.read_bytes(), *(None if path is None else path.read_bytes() for path in own)
    )
    return grpc.secure_channel(endpoint, credentials, options=options)


def _range_request(make: Any, keys: KeyRange) -> Any:
    return make(key=keys.start.encode(), range_end=keys.end.encode())


def _to_pair(pair: Any) -> KeyValue:
    return KeyValue(
        key=pair.key.decode(),
        value=bytes(pair.value),
        create_revision=int(pair.create_revision),
        mod_revision=int(pair.mod_revision),
        lease=int(pair.lease),
    )


def _to_compare(compare: Compare) -> Any:
    made = etcdrpc.Compare(
        key=compare.key.encode(),
        result=etcdrpc.Compare.EQUAL if compare.operator is Operator.EQUAL else etcdrpc.Compare.GREATER,
        range_end=prefix_range(compare.key).end.encode() if compare.whole_prefix else b"",
    )
    match compare.target:
        case Target.CREATE_REVISION:
            made.target, made.create_revision = etcdrpc.Compare.CREATE, compare.expected
        case Target.MOD_REVISION:
            made.target, made.mod_revision = etcdrpc.Compare.MOD, compare.expected
        case Target.VALUE:
            made.target, made.value = etcdrpc.Compare.VALUE, compare.expected
    return made
