"""Asking an agent itself what it knows; it answers whoever has the token of its job."""

from __future__ import annotations

import socket
import time

import msgspec

from deadpool.report import AgentStatus
from deadpool.runtime.ipc import CONTROL_FRAME_BYTES, Channel, ChannelClosed
from deadpool.runtime.messages import StatusReply, StatusRequest


def ask_agent(address: str, token: str, deadline_s: float) -> AgentStatus | None:
    """One agent's answer, or None if it gives none in time.

    Args:
        address: `IP:control_port`.
        token: of the job.
        deadline_s: of `time.monotonic`.
    """
    host, _, port = address.rpartition(":")
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return None
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=left_s)
    except (OSError, ValueError):
        return None
    channel: Channel[StatusReply] = Channel(sock, StatusReply, CONTROL_FRAME_BYTES)
    try:
        channel.settimeout(max(0.01, deadline_s - time.monotonic()))
        channel.send(StatusRequest(token=token))
        reply = channel.receive_first(CONTROL_FRAME_BYTES, max(0.01, deadline_s - time.monotonic()))
        return msgspec.msgpack.decode(reply.body, type=AgentStatus)
    except (ChannelClosed, msgspec.MsgspecError):
        return None  # stopped, fenced, of another job, or of another version: no answer
    finally:
        channel.close()
