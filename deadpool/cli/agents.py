"""Asking agents themselves what they know; they answer whoever has the token of their job."""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Iterable

import msgspec

from deadpool.report import AgentStatus
from deadpool.runtime.ipc import CONTROL_FRAME_BYTES, Channel, ChannelClosed
from deadpool.runtime.messages import StatusReply, StatusRequest

ASKED_AT_ONCE = 100  # an answer takes milliseconds, and a user may have few descriptors and threads
_ANSWER_S = 0.8  # for one of many: those who are silent must not cost the others their turn
_FAIR_S = 0.3  # who had less than this until the deadline counts as not asked


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


class Inquiry:
    """Asks many agents, ASKED_AT_ONCE at a time, until a deadline.

    Args:
        deadline_s: of `time.monotonic`; who has not answered by then is not waited for.
    """

    def __init__(self, deadline_s: float) -> None:
        self.asked: set[str] = set()  # addresses that had time to answer; the silence of others says nothing
        self._deadline_s = deadline_s
        self._waiting: queue.SimpleQueue[tuple[str, str, float]] = queue.SimpleQueue()
        self._answers: list[AgentStatus] = []
        self._threads: list[threading.Thread] = []

    def ask(self, addresses: Iterable[str], token: str) -> None:
        """Begin to ask these."""
        new = list(dict.fromkeys(addresses))
        turn_s = math.inf if len(new) <= ASKED_AT_ONCE else _ANSWER_S
        for address in new:
            self._waiting.put((address, token, turn_s))
        for _ in range(min(len(new), ASKED_AT_ONCE)):
            # Daemons: they are not waited for past the deadline, and the command ends then.
            thread = threading.Thread(target=self._ask_in_turn, name="inquiry", daemon=True)
            thread.start()
            self._threads.append(thread)

    def answers(self) -> list[AgentStatus]:
        """Whoever has answered, as soon as all have or the deadline has passed."""
        for thread in self._threads:
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
        return list(self._answers)

    def _ask_in_turn(self) -> None:
        while time.monotonic() < self._deadline_s:
            try:
                address, token, turn_s = self._waiting.get_nowait()
            except queue.Empty:
                return
            began_s = time.monotonic()
            if self._deadline_s - began_s >= _FAIR_S:
                self.asked.add(address)
            reply = ask_agent(address, token, min(self._deadline_s, began_s + turn_s))
            if reply is not None:
                self._answers.append(reply)
