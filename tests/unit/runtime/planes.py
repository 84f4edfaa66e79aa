"""Control planes on loopback, and a bare socket that talks to one."""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deadpool.core.types import Member, MemberId
from deadpool.runtime.control import ControlCallbacks, ControlPlane
from deadpool.runtime.ipc import Channel
from deadpool.runtime.messages import Control, Hello, Message
from tests.unit.runtime.support import LOOPBACK, TOKEN, WAIT_S, make_member

STATUS = b"the status of this agent"


class Plane:
    """One agent's control plane, and what it heard."""

    def __init__(self, id: MemberId, token: str = TOKEN) -> None:
        self.id = id
        self.heard: queue.Queue[tuple[MemberId, Control]] = queue.Queue()
        self.gone: queue.Queue[MemberId] = queue.Queue()
        self.control = ControlPlane(
            LOOPBACK,
            token,
            lambda: Hello(member=id, token=token, generation=1),
            ControlCallbacks(
                message=lambda member, message: self.heard.put((member, message)),
                gone=self.gone.put,
                status=lambda: STATUS,
            ),
        )
        self.member: Member = make_member(id, self.control.start())

    def knows(self, *others: Plane) -> None:
        self.control.set_peers({other.id: other.member for other in others})

    def next(self) -> tuple[MemberId, Control]:
        return self.heard.get(timeout=WAIT_S)


@contextmanager
def planes(*ids: MemberId) -> Iterator[list[Plane]]:
    """Planes that all know each other."""
    made = [Plane(id) for id in ids]
    for plane in made:
        plane.knows(*(other for other in made if other is not plane))
    try:
        yield made
    finally:
        for plane in made:
            plane.control.close()


@contextmanager
def dial(port: int) -> Iterator[tuple[socket.socket, Channel[Any]]]:
    """A stranger's connection to a plane."""
    sock = socket.create_connection((LOOPBACK, port), timeout=WAIT_S)
    channel: Channel[Any] = Channel(sock, Control)
    try:
        yield sock, channel
    finally:
        channel.close()


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side ends the connection instead of saying anything."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def hello(id: str = "stranger", token: str = TOKEN) -> Message:
    return Hello(member=id, token=token, generation=1)
