"""The key-value server through which communicators find their peers.

Hosted by an agent, never by a rank; no torch here.

One thread. Keys live in the generation they were set in: a newer generation neither sees nor overwrites them,
and all keys of older generations go when the server moves on, so no value of an older one can be read.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from deadpool.communicator.rendezvous_wire import (
    MAX_FRAME_BYTES,
    Op,
    Reply,
    Request,
    Status,
    encode_frame,
    take_requests,
)
from deadpool.ports import (
    ACCEPT_PAUSE_S,
    HELLO_FRAME_BYTES,
    HELLO_TIMEOUT_S,
    MAX_STRANGERS,
    StrangerLog,
    listen,
)

logger = logging.getLogger(__name__)

_MAX_POLL_S = 1.0
_JOIN_S = 5.0
_BACKLOG = 1024
_RECV_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    peer: str
    greet_by_s: float
    greeted: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class _Parked:
    """A GET or WAIT whose keys are not all there yet."""

    connection: _Connection
    request: Request
    missing: set[str]
    deadline_s: float


class RendezvousServer:
    """Serves bootstrap keys of the current generation; `start()` before use, `close()` at the end."""

    def __init__(self, host: str, job_token: str, *, port: int = 0) -> None:
        self._host = host
        self._port = port
        self._token = job_token
        self._generation = 0
        self._data: dict[int, dict[str, bytes]] = {}
        self._parked: list[_Parked] = []
        self._strangers: dict[_Connection, None] = {}  # not greeted yet, the oldest first
        self._stranger_log = StrangerLog("rendezvous")
        self._accept_again_s = 0.0  # 0: accepting
        self._commands: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake_receiver, self._wake_sender = socket.socketpair()

    def start(self) -> int:
        """Listen and serve; returns the port."""
        listener = listen(self._host, self._port, backlog=_BACKLOG)
        listener.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, name="deadpool-rendezvous", daemon=True)
        self._thread.start()
        port: int = listener.getsockname()[1]
        return port

    def set_generation(self, generation: int) -> None:
        """Refuse older requests from now on, waiting ones too, and drop their keys."""
        self._run(lambda: self._advance(generation))

    def close(self) -> None:
        """Stop serving and join the thread. May be called again."""
        if self._thread is None:
            self._wake_receiver.close()
            self._wake_sender.close()
            self._selector.close()
            return
        self._run(self._stop)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning("the rendezvous server did not stop within %.0f s", _JOIN_S)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            pass  # closed already: nothing left to command

    def _serve(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._poll_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_receiver:
                        self._obey()
                    else:
                        self._exchange(key.data, events)
                self._expire()
        finally:
            self._listener.close()  # it may be out of the selector: see `_accept`
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._wake_sender.close()
            self._selector.close()

    def _poll_s(self) -> float:
        times_s = [parked.deadline_s for parked in self._parked]
        times_s += [stranger.greet_by_s for stranger in islice(self._strangers, 1)]
        times_s += [self._accept_again_s] if self._accept_again_s else []
        soonest = min(times_s, default=time.monotonic() + _MAX_POLL_S)
        return min(_MAX_POLL_S, max(0.0, soonest - time.monotonic()))

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            # Out of descriptors, or the peer is gone already. The listener stays readable: without a pause
            # this thread would do nothing else.
            logger.warning("rendezvous port: cannot accept: %s", error)
            self._selector.unregister(self._listener)
            self._accept_again_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        peer = f"{address[0]}:{address[1]}"
        if len(self._strangers) >= MAX_STRANGERS:
            sock.close()
            self._stranger_log.turned_away(peer, f"{MAX_STRANGERS} others have not said who they are")
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock, peer, time.monotonic() + HELLO_TIMEOUT_S)
        self._strangers[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _obey(self) -> None:
        self._wake_receiver.recv(_RECV_BYTES)
        while self._commands:
            self._commands.popleft()()

    def _advance(self, generation: int) -> None:
        if generation <= self._generation:
            return
        self._generation = generation
        self._data = {number: keys for number, keys in self._data.items() if number >= generation}
        stale = [parked for parked in self._parked if parked.request.generation < generation]
        self._parked = [parked for parked in self._parked if parked.request.generation >= generation]
        for parked in stale:
            self._reply(parked.connection, self._stale())

    def _exchange(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                chunk = connection.sock.recv(_RECV_BYTES)
                if not chunk:
                    self._turn_away(connection, "it closed without a word")
                    return
                connection.received += chunk
                limit = MAX_FRAME_BYTES if connection.greeted else HELLO_FRAME_BYTES
                for request in take_requests(connection.received, limit):
                    self._answer(connection, request)
        except (OSError, ValueError) as error:
            self._turn_away(connection, str(error))

    def _turn_away(self, connection: _Connection, why: str) -> None:
        if connection.greeted:
            logger.debug("a rendezvous connection ended: %s", why)
        else:
            self._stranger_log.turned_away(connection.peer, why)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        self._parked = [parked for parked in self._parked if parked.connection is not connection]
        if connection.sock.fileno() >= 0:
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _answer(self, connection: _Connection, request: Request) -> None:
        if not connection.greeted:
            known = request.op is Op.HELLO and len(request.keys) == 1
            if not known or not hmac.compare_digest(request.keys[0].encode(), self._token.encode()):
                raise ValueError("it does not show this job's token")
            connection.greeted = True
            self._strangers.pop(connection, None)
        if request.generation < self._generation:
            self._reply(connection, self._stale())
            return
        data = self._data.setdefault(request.generation, {})
        if request.op in (Op.GET, Op.WAIT):
            missing = {key for key in request.keys if key not in data}
            if missing:
                deadline_s = time.monotonic() + request.timeout_s
                self._parked.append(_Parked(connection, request, missing, deadline_s))
                return
        self._reply(connection, _apply(data, request))
        if request.op in (Op.SET, Op.ADD, Op.APPEND, Op.COMPARE_SET):
            self._wake_waiting(request.generation, request.keys)

    def _wake_waiting(self, generation: int, keys: list[str]) -> None:
        ready = []
        for parked in self._parked:
            if parked.request.generation == generation:
                parked.missing.difference_update(keys)
                if not parked.missing:
                    ready.append(parked)
        for parked in ready:
            self._parked.remove(parked)
            self._reply(parked.connection, _apply(self._data[generation], parked.request))

    def _expire(self) -> None:
        now_s = time.monotonic()
        if self._accept_again_s and self._accept_again_s <= now_s:
            self._accept_again_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for stranger in [each for each in self._strangers if each.greet_by_s <= now_s]:
            self._turn_away(stranger, f"it said nothing that makes sense for {HELLO_TIMEOUT_S:g} s")
        for parked in [parked for parked in self._parked if parked.deadline_s <= now_s]:
            self._parked.remove(parked)
            self._reply(parked.connection, Reply(status=Status.TIMEOUT, keys=sorted(parked.missing)))

    def _stale(self) -> Reply:
        return Reply(status=Status.STALE, number=self._generation)

    def _reply(self, connection: _Connection, reply: Reply) -> None:
        connection.unsent += encode_frame(reply)
        try:
            self._flush(connection)
        except OSError as error:
            logger.debug("a rendezvous reply was not delivered: %s", error)
            self._drop(connection)

    def _flush(self, connection: _Connection) -> None:
        if connection.sock.fileno() < 0:
            return
        while connection.unsent:
            try:
                sent = connection.sock.send(connection.unsent)
            except BlockingIOError:
                break
            del connection.unsent[:sent]
        writing = selectors.EVENT_WRITE if connection.unsent else 0
        self._selector.modify(connection.sock, selectors.EVENT_READ | writing, connection)


def _apply(data: dict[str, bytes], request: Request) -> Reply:
    """Carry out `request` on the keys of its generation; the keys of GET and WAIT are all there."""
    keys, values = request.keys, request.values
    match request.op:
        case Op.SET:
            data.update(zip(keys, values, strict=True))
        case Op.GET:
            return Reply(status=Status.OK, values=[data[key] for key in keys])
        case Op.CHECK:
            return Reply(status=Status.OK, number=int(all(key in data for key in keys)))
        case Op.ADD:
            (key,) = keys
            number = int(data.get(key, b"0")) + request.number
            data[key] = str(number).encode()
            return Reply(status=Status.OK, number=number)
        case Op.APPEND:
            for key, value in zip(keys, values, strict=True):
                data[key] = data.get(key, b"") + value
        case Op.COMPARE_SET:
            (key,) = keys
            expected, desired = values
            if data.get(key, b"") == expected:
                data[key] = desired
            return Reply(status=Status.OK, values=[data.get(key, expected)])
        case Op.DELETE:
            return Reply(status=Status.OK, number=sum(data.pop(key, None) is not None for key in keys))
        case Op.COUNT:
            return Reply(status=Status.OK, number=len(data))
        case Op.HELLO | Op.WAIT:
            pass
    return Reply(status=Status.OK)
