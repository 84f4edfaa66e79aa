"""The connection to an etcd cluster: endpoints, deadlines, repetition, token.

[Note: what this connection must survive]
    - A dead endpoint: each call goes to the endpoint that answered last, and on to the next one if it fails.
    - An answer that never came: a call that may have been applied is repeated only if that does no harm. A
      transaction may not be, so it raises, and the caller reads back (see `registry.py`).
    - A server that is frozen: every call has a deadline, and gRPC pings an idle connection. A lost ping is
      noticed only with both keepalive options AND `ping_timeout_ms` (6 s / 2 s notices within 8 s). etcd
      drops clients that ping more often than every 5 s, unless it runs with --grpc-keepalive-min-time.
    - A reconnect: gRPC by itself waits up to 120 s between attempts; here at most 1 s.
    - A member cut off from its leader: watches carry `hasleader`, so that the server ends them.
    - Tokens that run out (5 min by default) or are forgotten by a restart: a refused call authenticates anew,
      once. A watch with an old token is "created" and cancelled in one answer, without an error.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deadpool.errors import ConfigError, StoreUnavailable
from deadpool.membership._rpc import etcdrpc, grpc

DEFAULT_PORT = 2379
_MAX_MESSAGE_BYTES = 64 << 20  # a listing of 10,000 members' records is about 5 MB; gRPC's own limit is 4
_RETRY_PAUSE_S = 0.05
_RECONNECT_MS = 1000
_T = TypeVar("_T")

_WORTH_ANOTHER_TRY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)


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
        keepalive_s: how long a connection may be silent before it is pinged; below 5 s only for a server that
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

    def check(self) -> None:
        """Refuse what cannot work, all problems at once.

        Raises:
            ConfigError: naming every problem.
        """
        problems = self.problems()
        if problems:
            raise ConfigError(problems)

    def problems(self) -> list[str]:
        """What cannot work, in sentences."""
        problems = []
        if not self.endpoints:
            problems.append("no etcd endpoint is given; use --etcd HOST:PORT[,HOST:PORT...]")
        if (self.user is None) != (self.password is None):
            problems.append(
                "etcd user and password go together; one of them is missing (the password is read from "
                "DEADPOOL_MEMBERSHIP_PASSWORD or a configuration file)"
            )
        if (self.cert_file is None) != (self.key_file is None):
            problems.append("etcd certificate and key go together; one of them is missing")
        if self.cert_file is not None and self.ca_file is None:
            problems.append("an etcd certificate needs the certificate of the authority (ca) too")
        return problems + self._tls_problems()

    def _tls_problems(self) -> list[str]:
        """What gRPC would report as a failed handshake, with neither the file nor the reason."""
        files = [path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]
        missing = [path for path in files if not path.is_file()]
        if missing:
            return [f"etcd TLS file {path} does not exist or is not a file" for path in missing]
        context = ssl.create_default_context()
        problems = []
        try:
            if self.ca_file is not None:
                context.load_verify_locations(self.ca_file)
        except (OSError, ssl.SSLError) as error:
            problems.append(f"etcd TLS file {self.ca_file} cannot be used as an authority: {_reason(error)}")
        try:
            if self.cert_file is not None and self.key_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            problems.append(
                f"etcd TLS files {self.cert_file} and {self.key_file} cannot be used as certificate and key "
                f"(PEM, the key without a passphrase): {_reason(error)}"
            )
        return problems


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Read a list like `a,b:2379,[::1]:2379`; a missing port is 2379, repeated ones count once.

    Raises:
        ConfigError: naming every part that cannot be used.
    """
    endpoints: list[str] = []
    problems: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        host, port = _split_port(part.removeprefix("http://").removeprefix("https://").rstrip("/"))
        if host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
            endpoints.append(f"{host}:{port}")
        else:
            problems.append(f"etcd endpoint {part!r} is not HOST or HOST:PORT (in {text!r})")
    if problems:
        raise ConfigError(problems)
    return tuple(dict.fromkeys(endpoints))


class RefusedByStore(Exception):
    """The store answered that what the request names does not exist."""


class EtcdConnection:
    """Channels to all endpoints of one cluster; opens them at first use. Safe to use from several threads."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._channels: dict[str, Any] = {}  # endpoint -> channel
        self._current = 0  # index of the endpoint that answered last
        self._token: str | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """End all calls and streams. Idempotent."""
        self._closed.set()
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def call(
        self,
        action: str,
        send: Callable[[Rpc], _T],
        *,
        repeatable: bool = True,
        timeout_s: float | None = None,
    ) -> _T:
        """Send one request, to the next endpoint if one fails, until it is answered or the time is over.

        Args:
            action: what is done, for messages.
            send: sends it over the stubs it is given.
            repeatable: whether it may be sent again although it may have been applied.
            timeout_s: another deadline than the configured one.

        Raises:
            RefusedByStore: what it names was not found.
            StoreUnavailable: no answer in time, or a refusal.
        """
        timeout_s = timeout_s or self.config.call_timeout_s
        deadline_s = time.monotonic() + timeout_s
        attempt_s = timeout_s / len(self.config.endpoints)
        attempts = 0
        authenticated_anew = False
        while True:
            index = self._current
            try:
                return send(self._stubs(index, min(attempt_s, deadline_s - time.monotonic())))
            except grpc.RpcError as error:
                failure = error
            except ValueError as error:
                if self._closed.is_set():  # gRPC's way to say that another thread closed the channel
                    raise StoreUnavailable(f"the connection to etcd is closed ({action})") from error
                raise
            code, details = failure.code(), failure.details() or ""
            if self._is_old_token(code, details) and not authenticated_anew:
                self._token, authenticated_anew = None, True
                continue
            if code is grpc.StatusCode.NOT_FOUND:
                raise RefusedByStore(details) from failure
            attempts += 1
            left_s = deadline_s - time.monotonic()
            is_safe = repeatable or _was_not_sent(code, details)
            if code not in _WORTH_ANOTHER_TRY or not is_safe or left_s <= 0 or self._closed.is_set():
                raise self._unavailable(action, index, code, details) from failure
            self._leave(index)
            if attempts % len(self.config.endpoints) == 0:
                if _is_distrust(details):  # time does not mend it
                    raise self._unavailable(action, index, code, details) from failure
                self._closed.wait(min(_RETRY_PAUSE_S, left_s))

    def stream_watch(self, create_request: Any, on_open: Callable[[Any], None]) -> Generator[Any, None, None]:
        """Open one watch and yield its answers until it ends.

        Args:
            create_request: what to watch.
            on_open: is given the stream, whose cancel() ends this from another thread.

        Raises:
            StoreUnavailable: the stream broke; the next one goes to another endpoint.
        """
        index = self._current
        ended = threading.Event()

        def requests() -> Iterator[Any]:
            yield etcdrpc.WatchRequest(create_request=create_request)
            ended.wait()  # the stream lives as long as its requests do not end

        stream = None
        try:
            stubs = self._stubs(index, self.config.call_timeout_s)
            stream = stubs.watch.Watch(requests(), metadata=(*stubs.metadata, ("hasleader", "true")))
            on_open(stream)
            yield from stream
        except grpc.RpcError as error:
            self._leave(index)
            raise self._unavailable("watch", index, error.code(), error.details() or "") from error
        except ValueError as error:
            if not self._closed.is_set():
                raise
            raise StoreUnavailable("the connection to etcd is closed (watch)") from error
        finally:
            ended.set()
            if stream is not None:
                stream.cancel()

    def forget_token(self) -> None:
        """Authenticate again before the next call."""
        self._token = None

    def _stubs(self, index: int, timeout_s: float) -> Rpc:
        channel = self._channel(index)
        if self.config.user is not None and self._token is None:
            request = etcdrpc.AuthenticateRequest(name=self.config.user, password=self.config.password)
            self._token = str(etcdrpc.AuthStub(channel).Authenticate(request, timeout=timeout_s).token)
        # As plain metadata, not as call credentials: gRPC refuses those on a connection without TLS.
        return Rpc(channel, timeout_s, (("token", self._token),) if self._token else ())

    def _channel(self, index: int) -> Any:
        endpoint = self.config.endpoints[index]
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailable("the connection to etcd is closed")
            if endpoint not in self._channels:
                self._channels[endpoint] = _open_channel(endpoint, self.config)
            return self._channels[endpoint]

    def _leave(self, index: int) -> None:
        with self._lock:
            if self._current == index:
                self._current = (index + 1) % len(self.config.endpoints)

    def _is_old_token(self, code: Any, details: str) -> bool:
        return self.config.user is not None and (
            code is grpc.StatusCode.UNAUTHENTICATED
            or "invalid auth token" in details
            or "revision of auth store is old" in details
        )

    def _unavailable(self, action: str, index: int, code: Any, details: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"etcd at {','.join(self.config.endpoints)} cannot be used ({action}; last asked "
            f"{self.config.endpoints[index]}: {code.name.lower().replace('_', ' ')}: {details}). "
            f"{_remedy(code, details)}"
        )


class Rpc:
    """Stubs of one endpoint whose every call carries a deadline and the token."""

    def __init__(self, channel: Any, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> None:
        self.metadata = metadata
        self.kv = _Bound(etcdrpc.KVStub(channel), timeout_s, metadata)
        self.lease = _Bound(etcdrpc.LeaseStub(channel), timeout_s, metadata)
        self.maintenance = _Bound(etcdrpc.MaintenanceStub(channel), timeout_s, metadata)
        self.watch = etcdrpc.WatchStub(channel)


class _Bound:
    def __init__(self, stub: Any, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub, self._timeout_s, self._metadata = stub, timeout_s, metadata

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        send = getattr(self._stub, method)
        return lambda request: send(request, timeout=self._timeout_s, metadata=self._metadata)


def _split_port(text: str) -> tuple[str, str]:
    if text.startswith("["):  # IPv6
        host, bracket, rest = text.partition("]")
        if not bracket or host == "[" or (rest and not rest.startswith(":")):
            return "", ""
        return host + bracket, rest[1:] if rest else str(DEFAULT_PORT)
    host, colon, port = text.partition(":")
    return host, port if colon else str(DEFAULT_PORT)


def _reason(error: OSError) -> str:
    """In words: "key values mismatch", not the place in a C file."""
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else error.strerror or str(error)


def _was_not_sent(code: Any, details: str) -> bool:
    """Whether a failed request surely never reached a server. In doubt: no."""
    return code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect to all addresses")


def _is_distrust(details: str) -> bool:
    return any(word in details for word in ("certificate", "SSL", "handshake"))


def _remedy(code: Any, details: str) -> str:
    if _is_distrust(details):
        return "Check the TLS files, and that the server's certificate names the host that --etcd names."
    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    if code in refusals or "auth" in details or "user name" in details:
        return "Check user and password; the user needs readwrite on the prefix /deadpool/."
    if "space" in details:
        return "etcd is out of space: compact and defragment it, then run etcdctl alarm disarm."
    return "Check that etcd runs and has a quorum, and that --etcd names its client port."


def _open_channel(endpoint: str, config: EtcdConfig) -> Any:
    keepalive_timeout_ms = round(config.keepalive_timeout_s * 1000)
    options = [
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS),  # also how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),  # two stores of a process share no connection
        ("grpc.enable_http_proxy", 0),
    ]
    if config.ca_file is None:
        return grpc.insecure_channel(endpoint, options=options)
    key, certificate = (
        None if path is None else path.read_bytes() for path in (config.key_file, config.cert_file)
    )
    credentials = grpc.ssl_channel_credentials(config.ca_file.read_bytes(), key, certificate)
    return grpc.secure_channel(endpoint, credentials, options=options)
