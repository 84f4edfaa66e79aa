"""Control connections between agents: heartbeats, commit messages, status requests.

Two connections to a peer: one for heartbeats alone, one for everything else, so that a long message never
delays a heartbeat. A connection that ends is looked into at once: a host that answers "connection refused"
says itself that the agent is gone, which needs no second observer.
"""

from __future__ import annotations

import errno
import hmac
import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from deadpool.core.types import Member, MemberId
from deadpool.ports import (
    ACCEPT_PAUSE_S,
    HELLO_FRAME_BYTES,
    HELLO_TIMEOUT_S,
    MAX_STRANGERS,
    StrangerLog,
    listen,
)
from deadpool.runtime.ipc import CONTROL_FRAME_BYTES, Channel, ChannelClosed
from deadpool.runtime.messages import Control, Heartbeat, Hello, StatusReply, StatusRequest

logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 1.0
SEND_TIMEOUT_S = 2.0
QUEUE_LIMIT = 4096  # messages waiting for one peer; more are dropped, senders repeat what matters
JOIN_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCallbacks:
    """What the agent wants to hear; called from connection threads."""

    message: Callable[[MemberId, Control], None]
    gone: Callable[[MemberId], None]  # the peer's host refused the connection: no such process
    status: Callable[[], bytes]  # msgpack of the status dict


class _Link:
    """One outgoing connection, its queue and its thread."""

    def __init__(self, plane: ControlPlane, peer: Member, label: str) -> None:
        self._plane = plane
        self._peer = peer
        self._queue: queue.Queue[Control | None] = queue.Queue(QUEUE_LIMIT)
        self._channel: Channel[Control] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"control-{label}-{peer.id}", daemon=True)
        self._thread.start()

    def send(self, message: Control) -> None:
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            pass  # the peer does not read; what matters is repeated by its sender

    def probe(self) -> None:
        """Look whether the peer still listens."""
        self.send(self._plane.hello())

    def close(self) -> None:
        self._closed = True
        self.send_nothing()
        channel = self._channel
        if channel is not None:
            channel.close()

    def send_nothing(self) -> None:
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread is awake and sees `_closed`

    def join(self) -> None:
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed:
            message = self._queue.get()
            if message is None or self._closed:
                break
            try:
                if isinstance(message, Hello):  # a probe: the old connection is not to be trusted
                    self._drop()
                    self._connect()
                else:
                    if self._channel is None:
                        self._connect()
                    assert self._channel is not None
                    self._channel.send(message)
            except (OSError, ChannelClosed) as error:
                self._drop()
                if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED and not self._closed:
                    self._plane.callbacks.gone(self._peer.id)
        self._drop()

    def _connect(self) -> None:
        sock = socket.create_connection(
            (self._peer.address, self._peer.control_port), timeout=CONNECT_TIMEOUT_S
        )
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SEND_TIMEOUT_S)
        self._channel = Channel(sock, Control, CONTROL_FRAME_BYTES)
        self._channel.send(self._plane.hello())

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class ControlPlane:
    """Listens for peers and keeps the outgoing connections.

    Args:
        address: address to listen on.
        token: the job's token; a connection that does not show it is closed.
        hello: makes the first message of a connection (this member, current generation).
        callbacks: see ControlCallbacks.
    """

    def __init__(
        self, address: str, token: str, hello: Callable[[], Hello], callbacks: ControlCallbacks
    ) -> None:
        self.callbacks = callbacks
        self.hello = hello
        self._token = token
        self._address = address
        self._lock = threading.Lock()
        self._links: dict[tuple[MemberId, str], _Link] = {}
        self._peers: dict[MemberId, Member] = {}
        self._inbound: set[Channel[Control]] = set()
        self._strangers: set[Channel[Control]] = set()  # those of them that have not said who they are
        self._stranger_log = StrangerLog("control")
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._closing = False

    def start(self) -> int:
        """Listen; returns the port."""
        self._listener = listen(self._address, backlog=256)
        self._acceptor = threading.Thread(target=self._accept, name="control-accept", daemon=True)
        self._acceptor.start()
        port: int = self._listener.getsockname()[1]
        return port

    def set_peers(self, peers: dict[MemberId, Member]) -> None:
        """The members that exist now; connections to others are closed."""
        with self._lock:
            self._peers = dict(peers)
            gone = [key for key in self._links if key[0] not in peers]
            links = [self._links.pop(key) for key in gone]
        for link in links:
            link.close()

    def send(self, member: MemberId, message: Control) -> None:
        """Queue a message for a peer; unknown peers are ignored. Never blocks."""
        label = "heartbeat" if isinstance(message, Heartbeat) else "message"
        link = self._link(member, label)
        if link is not None:
            link.send(message)

    def broadcast(self, message: Control) -> None:
        with self._lock:
            members = list(self._peers)
        for member in members:
            self.send(member, message)

    def probe(self, member: MemberId) -> None:
        link = self._link(member, "message")
        if link is not None:
            link.probe()

    def close(self) -> None:
        """Close every connection and join the threads within a bound."""
        with self._lock:
            self._closing = True
        if self._listener is not None:
            try:
                self._listener.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected: closing it is enough
            self._listener.close()
        with self._lock:
            links, self._links = list(self._links.values()), {}
            inbound = list(self._inbound)
        for link in links:
            link.close()
        for channel in inbound:
            channel.close()
        for link in links:
            link.join()
        if self._acceptor is not None:
            self._acceptor.join(JOIN_TIMEOUT_S)

    def _link(self, member: MemberId, label: str) -> _Link | None:
        with self._lock:
            peer = self._peers.get(member)
            if peer is None or self._closing:
                return None
            key = (member, label)
            if key not in self._links:
                self._links[key] = _Link(self, peer, label)
            return self._links[key]

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Out of descriptors, or the peer is gone already: the port goes on serving.
                logger.warning("control port: cannot accept: %s", error)
                threading.Event().wait(ACCEPT_PAUSE_S)
                continue
            peer = f"{address[0]}:{address[1]}"
            channel: Channel[Control] = Channel(sock, Control, CONTROL_FRAME_BYTES)
            if not self._take_in(channel):
                channel.close()
                self._turned_away(peer, f"{MAX_STRANGERS} others have not said who they are")
                continue
            serve = partial(self._serve, channel, peer)
            threading.Thread(target=serve, name="control-in", daemon=True).start()

    def _take_in(self, channel: Channel[Control]) -> bool:
        with self._lock:
            is_taken = len(self._strangers) < MAX_STRANGERS and not self._closing
            if is_taken:
                self._inbound.add(channel)
                self._strangers.add(channel)
        return is_taken

    def _serve(self, channel: Channel[Control], peer: str) -> None:
        member = ""
        try:
            member = self._greet(channel, peer)
            while member:
                message = channel.receive()
                if not isinstance(message, Hello):
                    self.callbacks.message(member, message)
        except (ChannelClosed, OSError, msgspec.MsgspecError):
            pass  # the connection ended, or did not speak our protocol: looked into below
        finally:
            with self._lock:
                self._inbound.discard(channel)
                self._strangers.discard(channel)
            channel.close()
            if member and not self._closing:
                self.probe(member)

    def _greet(self, channel: Channel[Control], peer: str) -> MemberId:
        """Learn who has connected; "" for whoever is not to be listened to any longer."""
        why = "it does not show this job's token"
        try:
            first = channel.receive_first(HELLO_FRAME_BYTES, HELLO_TIMEOUT_S)
        except (ChannelClosed, OSError, msgspec.MsgspecError) as error:
            first, why = None, str(error)
        match first:
            case StatusRequest() if self._is_ours(first.token):
                channel.send(StatusReply(body=self.callbacks.status()))
                return ""
            case Hello() if self._is_ours(first.token):
                with self._lock:
                    self._strangers.discard(channel)
                return first.member
        self._turned_away(peer, why)
        return ""

    def _turned_away(self, peer: str, why: str) -> None:
        if not self._closing:  # at the end everybody is hung up on
            self._stranger_log.turned_away(peer, why)

    def _is_ours(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())
