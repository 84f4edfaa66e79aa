"""The TCP transport: blocking threads, `send` from the mapping, `recv_into` the mapping.

[Note: why send and not sendfile] Overwriting a bank after sendfile returned changed bytes that the
receiver had not got yet (measured); `send` has copied them when it returns, so a bank is free once the
last chunk is handed to the kernel. It was also faster between mappings.

Threads: one that accepts, one per connection accepted; a push or fetch runs in its caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from deadpool.errors import SnapshotError
from deadpool.ports import ACCEPT_PAUSE_S, HELLO_TIMEOUT_S, StrangerLog, listen
from deadpool.store import wire
from deadpool.store.tcp_connection import (
    FRAME_TIMEOUT_S,
    Check,
    Connection,
    StallWatch,
    receive_areas,
    receive_reply,
    send_areas,
)
from deadpool.store.transport import (
    Address,
    Area,
    CopyInfo,
    Deadline,
    Endpoint,
    FetchRequest,
    Lane,
    PeerRefused,
    Source,
    StreamHeader,
    StreamStopped,
    Transport,
    TransportFailed,
    areas_to_send,
    lower_priority,
    match_views,
)

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 30.0
"""A stream or fetch that moves no byte for so long is dropped by the serving side."""
CLOSE_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 512
MAX_IDLE_PER_PEER = 4


class TcpTransport(Transport):
    """Carries copies over TCP.

    Args:
        job_token: secret of the job; a peer with another one is closed.
        bind_host: local address to serve on.
    """

    def __init__(self, job_token: str, *, bind_host: str = "127.0.0.1") -> None:
        self._job_token = job_token
        self._bind_host = bind_host
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: dict[tuple[Address, Lane], list[Connection]] = {}
        self._open: set[Connection] = set()
        self._stranger_log = StrangerLog("data")
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._threads: set[threading.Thread] = set()

    def push(
        self, address: Address, header: StreamHeader, source: Source, *, lane: Lane, timeout_s: float
    ) -> None:
        deadline = Deadline(timeout_s, f"push of rank {header.rank} to {address}")

        def check() -> None:
            source.check()
            deadline.check()

        connection, code, need_once, reason = self._announce(address, header, source, lane, deadline, check)
        if code is wire.Code.ACCEPT:
            with self._conversation(connection, f"push to {address}", source):
                send_areas(connection, areas_to_send(source.areas, need_once=need_once), source, check)
                connection.send(wire.encode_end(source.finish()), check)
                code, _, reason = receive_reply(connection, check)
                source.on_cancel(None)
        self._put_back(connection, address, lane)
        if code is not wire.Code.HELD:
            raise PeerRefused(f"holder {address}: {reason}")

    def fetch(
        self,
        address: Address,
        request: FetchRequest,
        place: Callable[[CopyInfo], Sequence[memoryview]],
        *,
        timeout_s: float,
    ) -> CopyInfo:
        deadline = Deadline(timeout_s, f"fetch of rank {request.rank} from {address}")
        connection = self._connect(address, wire.Kind.FETCH, Lane.SMALL, deadline.check)
        with self._conversation(connection, f"fetch from {address}"):
            connection.send(wire.encode_request(request), deadline.check)
            code, _, reason = receive_reply(connection, deadline.check)
            if code is not wire.Code.ACCEPT:
                raise PeerRefused(f"{address}: {reason}")
            info = wire.decode_info(connection.receive(wire.INFO_BYTES, deadline.check))
            receive_areas(connection, match_views(info, place(info)), deadline.check, lambda *_: None)
            wire.decode_end(connection.receive(wire.CHUNK_HEADER_BYTES, deadline.check))
        self._drop(connection)
        return info

    def serve(self, endpoint: Endpoint) -> Address:
        listener = listen(self._bind_host, backlog=128)
        self._listener = listener
        self._accepting = self._start_thread("deadpool-data-accept", lambda: self._accept(listener, endpoint))
        host, port = listener.getsockname()[:2]
        return host, port

    def close(self) -> None:
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        with self._lock:
            self._is_closed = True
            self._idle.clear()
            accepting = self._accepting
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close alone does not
            self._listener.close()
        if accepting is not None:
            accepting.join(CLOSE_TIMEOUT_S)  # nothing is added to the two sets after this
        with self._lock:
            connections, threads = list(self._open), list(self._threads)
        for connection in connections:
            connection.shut_down()
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        for connection in connections:
            self._drop(connection)
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            logger.error("data threads still running %.0f s after close: %s", CLOSE_TIMEOUT_S, left)

    # -- client side

    def _announce(
        self,
        address: Address,
        header: StreamHeader,
        source: Source,
        lane: Lane,
        deadline: Deadline,
        check: Check,
    ) -> tuple[Connection, wire.Code, bool, str]:
        """Send the header and get the holder's word, over a connection that lives."""
        while (idle := self._take_idle(address, lane)) is not None:
            # Its peer may have gone since: that is no failed attempt, the next connection is tried.
            with contextlib.suppress(TransportFailed), self._conversation(idle, "idle connection", source):
                deadline.check()
                return idle, *_send_header(idle, header, source, check)
        deadline.check()
        self._drop_abandoned()
        connection = self._connect(address, wire.Kind.PUSH, lane, check)
        with self._conversation(connection, f"stream to {address}", source):
            return connection, *_send_header(connection, header, source, check)
        raise AssertionError("a conversation never swallows an error")

    def _connect(self, address: Address, kind: wire.Kind, lane: Lane, check: Check) -> Connection:
        try:
            connection = Connection.open(address, check)
        except OSError as error:
            raise TransportFailed(f"cannot connect to {address}: {error}") from error
        self._track(connection)
        with self._conversation(connection, f"greeting {address}"):
            connection.send(wire.encode_hello(self._job_token, kind, lane), check)
        return connection

    @contextmanager
    def _conversation(
        self, connection: Connection, what: str, source: Source | None = None
    ) -> Iterator[None]:
        """Close the connection on any error, and say TransportFailed for a broken one."""
        try:
            yield
        except (OSError, SnapshotError) as error:
            if source is not None:
                source.on_cancel(None)
            self._drop(connection)
            if isinstance(error, SnapshotError):
                raise
            if source is not None:
                source.check()  # a stop shuts the socket down: that is no failure of the peer
            raise TransportFailed(f"{what}: {error}") from error

    def _take_idle(self, address: Address, lane: Lane) -> Connection | None:
        with self._lock:
            idle = self._idle.get((address, lane))
            return idle.pop() if idle else None

    def _put_back(self, connection: Connection, address: Address, lane: Lane) -> None:
        with self._lock:
            idle = self._idle.setdefault((address, lane), [])
            if not self._is_closed and len(idle) < MAX_IDLE_PER_PEER:
                idle.append(connection)
                return
        self._drop(connection)

    def _drop_abandoned(self) -> None:
        """Close idle connections that their peers have closed: nobody asks for a dead holder's any more."""
        with self._lock:
            abandoned = [each for idle in self._idle.values() for each in idle if each.is_abandoned()]
            kept = {key: [each for each in idle if each not in abandoned] for key, idle in self._idle.items()}
            self._idle = {key: idle for key, idle in kept.items() if idle}
        for connection in abandoned:
            self._drop(connection)

    # -- server side

    def _accept(self, listener: socket.socket, endpoint: Endpoint) -> None:
        while True:
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # Out of descriptors, or the peer is gone already: the port goes on serving.
                logger.warning("data port: cannot accept: %s", error)
                threading.Event().wait(ACCEPT_PAUSE_S)
                continue
            peer_name = f"{peer[0]}:{peer[1]}"
            with self._lock:
                is_full = len(self._open) >= MAX_CONNECTIONS
            if is_full:
                self._stranger_log.turned_away(peer_name, f"{MAX_CONNECTIONS} connections are open")
                sock.close()
                continue
            connection = Connection(sock)
            try:
                self._track(connection)
            except TransportFailed:
                return
            serve = partial(self._serve_peer, connection, peer_name, endpoint)
            self._start_thread(f"deadpool-data-{peer[1]}", serve)

    def _serve_peer(self, connection: Connection, peer: str, endpoint: Endpoint) -> None:
        is_known = False
        try:
            hello = connection.receive(wire.HELLO_BYTES, Deadline(HELLO_TIMEOUT_S, "hello").check)
            kind, lane = wire.decode_hello(hello, self._job_token)
            is_known = True
            if kind is wire.Kind.FETCH:
                self._serve_fetch(connection, endpoint)
            else:
                while self._serve_push(connection, lane, endpoint):
                    pass
        # As text: a record that kept the error would keep its frames, and they the mapping.
        except (OSError, SnapshotError) as error:
            if not is_known and not self._is_closed:
                self._stranger_log.turned_away(peer, str(error))
            elif isinstance(error, ConnectionError | StreamStopped):
                logger.info("data port: %s closed: %s", peer, str(error))
            else:
                logger.warning("data port: %s closed: %s", peer, str(error))
        finally:
            self._drop(connection)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _serve_push(self, connection: Connection, lane: Lane, endpoint: Endpoint) -> bool:
        """Serve one stream; False once the peer has no more."""
        frame = connection.receive_when_sent(wire.STREAM_BYTES, self._check_open)
        if frame is None:
            return False
        header = wire.decode_stream(frame)
        refusal = ""
        try:
            # The first one makes the segment. At nice 19 the kernel would take a minute to clear a few GB
            # on a busy host, while the job waits for snapshot 0: so the priority falls only after it.
            opened = endpoint.open_sink(header, connection.shut_down)
        except PeerRefused as error:
            refusal = str(error)
        stall = StallWatch(STALL_TIMEOUT_S, f"stream of rank {header.rank}")
        if refusal:
            connection.send(wire.encode_reply(wire.Code.REFUSED, reason=refusal), stall.check)
            return True
        if lane is Lane.BULK:
            lower_priority()
        if opened is not None:
            with opened as sink:

                def check() -> None:
                    sink.check()
                    stall.check()

                def received(area: Area, n_bytes: int, digest: int) -> None:
                    sink.chunk_received(area, n_bytes, digest)
                    stall.progress()

                need_once = any(area is Area.ONCE for area, _ in sink.areas)
                connection.send(wire.encode_reply(wire.Code.ACCEPT, need_once=need_once), check)
                receive_areas(connection, sink.areas, check, received)
                sink.commit(wire.decode_end(connection.receive(wire.CHUNK_HEADER_BYTES, check)))
        connection.send(wire.encode_reply(wire.Code.HELD), stall.check)
        return True

    def _serve_fetch(self, connection: Connection, endpoint: Endpoint) -> None:
        stall = StallWatch(STALL_TIMEOUT_S, "fetch")
        frame = connection.receive(wire.REQUEST_BYTES, Deadline(FRAME_TIMEOUT_S, "fetch request").check)
        try:
            info, opened = endpoint.open_source(wire.decode_request(frame))
        except PeerRefused as error:
            connection.send(wire.encode_reply(wire.Code.REFUSED, reason=str(error)), stall.check)
            return
        with opened as source:

            def check() -> None:
                source.check()
                stall.check()

            source.on_cancel(connection.shut_down)
            connection.send(wire.encode_reply(wire.Code.ACCEPT) + wire.encode_info(info), check)
            try:
                for areas in [[each] for each in source.areas]:
                    send_areas(connection, areas, source, check)
                    stall.progress()
                checksum = source.finish()
            except StreamStopped:
                connection.send(wire.encode_end(None), stall.check)
                raise
            connection.send(wire.encode_end(checksum), stall.check)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamStopped("this host closes its data port")

    # -- helpers

    def _track(self, connection: Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._open.add(connection)
                return
        connection.close()
        raise TransportFailed("the transport is closed")

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def _start_thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
            thread.start()
        return thread


def _send_header(
    connection: Connection, header: StreamHeader, source: Source, check: Check
) -> tuple[wire.Code, bool, str]:
    source.on_cancel(connection.shut_down)
    connection.send(wire.encode_stream(header), check)
    reply = receive_reply(connection, check)
    if reply[0] is not wire.Code.ACCEPT:
        source.on_cancel(None)
    return reply
