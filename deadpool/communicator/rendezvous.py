"""Client of the agent-hosted rendezvous server, as a torch.distributed Store.

Its waits end at close: every connection is known to the native registry, which shuts it down without the GIL.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from deadpool.communicator.extension import native
from deadpool.communicator.rendezvous_wire import Op, Reply, Request, Status, encode_frame, read_reply
from deadpool.errors import CollectiveAborted

_CALL_S = 30.0
"""Limit of a call that the server answers at once."""

_RETRY_S = 0.05
_MARGIN_S = 5.0
"""How much longer than a wait's own deadline the client listens for the answer."""


class RendezvousStore(Store):
    """Keys of one generation on one server.

    Several threads may use it: each call takes a connection of its own. `close()` releases them.

    Args:
        host: address of the agent named in the View.
        port: its rendezvous port.
        token: the job's token.
        generation: generation that the keys belong to; a server at a newer one refuses every call.
        timeout_s: default deadline of waits, and of connecting.
    """

    def __init__(self, host: str, port: int, *, token: str, generation: int, timeout_s: float) -> None:
        super().__init__()
        self.generation = generation
        self._address = (host, port)
        self._token = token
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._closed = False

    def close(self) -> None:
        """Release all idle connections; calls from now on raise CollectiveAborted."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            _release(connection)

    # ---- torch.distributed.Store (the base class is untyped at run time: C++ calls these by name) ----

    def set(self, key: str, value: str | bytes) -> None:
        self._call(Request(op=Op.SET, generation=self.generation, keys=[key], values=[_bytes(value)]))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        encoded = [_bytes(value) for value in values]
        self._call(Request(op=Op.SET, generation=self.generation, keys=list(keys), values=encoded))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for(Op.GET, keys, self.timeout_s).values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(Op.WAIT, keys, self.timeout_s if timeout is None else timeout.total_seconds())

    def missing(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait for all `keys`; returns those that are still missing at the deadline."""
        return self._ask(Op.WAIT, keys, timeout_s).keys

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call(Request(op=Op.CHECK, generation=self.generation, keys=list(keys))).number)

    def add(self, key: str, value: int) -> int:
        return self._call(Request(op=Op.ADD, generation=self.generation, keys=[key], number=value)).number

    def append(self, key: str, value: str | bytes) -> None:
        self._call(Request(op=Op.APPEND, generation=self.generation, keys=[key], values=[_bytes(value)]))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        values = [_bytes(expected_value), _bytes(desired_value)]
        request = Request(op=Op.COMPARE_SET, generation=self.generation, keys=[key], values=values)
        return self._call(request).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._call(Request(op=Op.DELETE, generation=self.generation, keys=[key])).number)

    def num_keys(self) -> int:
        return self._call(Request(op=Op.COUNT, generation=self.generation)).number

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RendezvousStore:
        """A store on the same keys with connections of its own."""
        host, port = self._address
        return RendezvousStore(
            host, port, token=self._token, generation=self.generation, timeout_s=self.timeout_s
        )

    # ---- calls ----

    def _wait_for(self, op: Op, keys: Sequence[str], timeout_s: float) -> Reply:
        reply = self._ask(op, keys, timeout_s)
        if reply.keys:
            raise dist.DistStoreError(
                f"rendezvous of generation {self.generation}: {len(reply.keys)} of {len(keys)} keys missing "
                f"after {timeout_s:g} s, among them {reply.keys[0]!r}"
            )
        return reply

    def _ask(self, op: Op, keys: Sequence[str], timeout_s: float) -> Reply:
        request = Request(op=op, generation=self.generation, keys=list(keys), timeout_s=timeout_s)
        return self._call(request, timeout_s + _MARGIN_S)

    def _call(self, request: Request, timeout_s: float = _CALL_S) -> Reply:
        with self._connection() as connection:
            connection.settimeout(timeout_s)
            connection.sendall(encode_frame(request))
            reply = read_reply(connection)
        if reply.status is Status.STALE:
            raise self._refusal(reply)
        return reply

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        connection = self._take()
        try:
            yield connection
        except (OSError, ValueError) as error:
            _release(connection)
            if self._is_over():
                raise CollectiveAborted(
                    f"generation {self.generation} was closed during a rendezvous"
                ) from error
            host, port = self._address
            raise dist.DistNetworkError(f"rendezvous server {host}:{port}: {error}") from error
        except BaseException:
            _release(connection)
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        _release(connection)

    def _refusal(self, reply: Reply) -> CollectiveAborted:
        return CollectiveAborted(
            f"the rendezvous server is at generation {reply.number} and refuses generation {self.generation}"
        )

    def _is_over(self) -> bool:
        return self._closed or native.closed_generation() >= self.generation

    def _take(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise CollectiveAborted(f"the rendezvous store of generation {self.generation} is closed")
            if self._idle:
                return self._idle.pop()
        return self._connect()

    def _connect(self) -> socket.socket:
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return self._connect_once(max(0.01, deadline_s - time.monotonic()))
            except OSError as error:
                host, port = self._address
                if self._is_over():
                    raise CollectiveAborted(
                        f"generation {self.generation} was closed while connecting to {host}:{port}"
                    ) from error
                if time.monotonic() + _RETRY_S >= deadline_s:
                    raise dist.DistNetworkError(
                        f"no rendezvous server at {host}:{port} within {self.timeout_s:g} s: {error}"
                    ) from error
            time.sleep(_RETRY_S)  # the agent named in the View may still be starting its server

    def _connect_once(self, timeout_s: float) -> socket.socket:
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
        try:
            # Registered before it connects: a close must end a connect to a dead host too.
            native.add_store_socket(connection.fileno(), self.generation)
        except BaseException:
            connection.close()
            raise
        try:
            connection.settimeout(timeout_s)
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(
                encode_frame(Request(op=Op.HELLO, generation=self.generation, keys=[self._token]))
            )
            reply = read_reply(connection)
        except BaseException:
            _release(connection)
            raise
        if reply.status is not Status.OK:
            _release(connection)
            raise self._refusal(reply)
        return connection


def _release(connection: socket.socket) -> None:
    native.remove_store_socket(connection.fileno())
    connection.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
