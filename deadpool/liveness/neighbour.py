"""Silence between hosts: who sends heartbeats to whom, and when a quiet neighbour is suspect or dead.

`SilenceDetector` decides and does nothing else; `NeighbourWatch` owns the thread that drives it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar, assert_never

from deadpool.config import LivenessConfig
from deadpool.core.silence import OBSERVERS_NEEDED
from deadpool.core.types import MemberId
from deadpool.events import boottime_s
from deadpool.liveness.pause import PauseMeter

logger = logging.getLogger(__name__)

LEASE_DECIDES = 0
"""Stands for the observers needed where only one member watches another: its lease alone decides."""

Payload = TypeVar("Payload")
_JOIN_TIMEOUT_S = 5.0


def neighbours(member: MemberId, members: Iterable[MemberId], reach: int = 2) -> tuple[MemberId, ...]:
    """The members that `member` exchanges heartbeats with: the next `reach` on both sides of the ring of ids.

    The relation is symmetric, so with enough members everybody is watched by 2 * reach others.
    """
    ring = sorted(set(members) | {member})
    place = ring.index(member)
    near = {ring[(place + offset) % len(ring)] for offset in range(-reach, reach + 1)}
    return tuple(sorted(near - {member}))


class Change(Enum):
    """What the detector says of a neighbour."""

    SUSPECT = "suspect"
    SILENT = "silent"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One change of mind about one neighbour."""

    member: MemberId
    change: Change
    age_s: float  # since it was last heard, own pauses not counted
    observers_needed: int = LEASE_DECIDES  # with SILENT: how many observers make it a death


@dataclass(slots=True)
class _Peer:
    heard_s: float
    change: Change = Change.RETURNED
    observers_needed: int = LEASE_DECIDES


class SilenceDetector:
    """Decides from heartbeats heard and time passed; no thread, no clock of its own.

    A pause of this process is not a silence of its peers. A short one (the loop was starved) is taken off
    everybody's silence; one as long as `silence_suspect_s` (the process was stopped) starts the grace period
    anew, because what peers sent meanwhile may still lie unread in a socket.

    Args:
        config: interval and limits.
        member: this member.
    """

    def __init__(self, config: LivenessConfig, member: MemberId) -> None:
        self._config = config
        self._member = member
        self._pauses = PauseMeter(config.heartbeat_interval_s)
        self._peers: dict[MemberId, _Peer] = {}
        self.paused_s = 0.0  # length of the pause found by the last tick

    @property
    def watched(self) -> tuple[MemberId, ...]:
        """Neighbours, as `neighbours` chose them."""
        return tuple(self._peers)

    @property
    def silent(self) -> tuple[MemberId, ...]:
        """Neighbours that count as dead for this observer: to be said again to a new leader."""
        return tuple(member for member, peer in self._peers.items() if peer.change is Change.SILENT)

    def set_members(self, members: Iterable[MemberId], now_s: float) -> None:
        """All members of the job, this one included or not. A new neighbour gets the full grace period."""
        everybody = set(members) | {self._member}
        self._peers = {
            member: self._peers.get(member) or _Peer(heard_s=now_s)
            for member in neighbours(self._member, everybody)
        }
        for member, peer in self._peers.items():
            observers = len(neighbours(member, everybody))
            peer.observers_needed = OBSERVERS_NEEDED if observers >= OBSERVERS_NEEDED else LEASE_DECIDES

    def heard(self, member: MemberId, now_s: float) -> Verdict | None:
        """A message of `member` arrived; any message counts, not only heartbeats."""
        peer = self._peers.get(member)
        if peer is None:
            return None
        age_s = now_s - peer.heard_s
        peer.heard_s = max(peer.heard_s, now_s)
        if peer.change is Change.RETURNED:
            return None
        peer.change = Change.RETURNED
        return Verdict(member=member, change=Change.RETURNED, age_s=age_s)

    def tick(self, now_s: float) -> list[Verdict]:
        """Time passed; to be called every `heartbeat_interval_s`. Each change is said once."""
        self.paused_s = self._pauses.tick(now_s)
        verdicts = []
        for member, peer in self._peers.items():
            if self.paused_s >= self._config.silence_suspect_s:
                peer.heard_s = now_s
            elif self.paused_s:
                peer.heard_s = min(now_s, peer.heard_s + self.paused_s)
            age_s = now_s - peer.heard_s
            change = self._judge(peer, age_s)
            if change is not peer.change:
                peer.change = change
                verdicts.append(
                    Verdict(member=member, change=change, age_s=age_s, observers_needed=peer.observers_needed)
                )
        return verdicts

    def ages_s(self, now_s: float) -> dict[MemberId, float]:
        """Seconds since each neighbour was heard."""
        return {member: max(0.0, now_s - peer.heard_s) for member, peer in self._peers.items()}

    def _judge(self, peer: _Peer, age_s: float) -> Change:
        if peer.change is Change.SILENT or age_s >= self._config.silence_dead_s:
            return Change.SILENT  # only a message ends it
        if peer.change is Change.SUSPECT or age_s >= self._config.silence_suspect_s:
            return Change.SUSPECT
        return Change.RETURNED


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceCallbacks:
    """Called on the watch's thread, `on_return` on the one that calls `heard`; they must not block."""

    on_suspect: Callable[[MemberId, float], None]  # member, seconds since it was heard
    on_silent: Callable[[MemberId, int], None]  # member, observers needed (LEASE_DECIDES: none will do)
    on_return: Callable[[MemberId], None]
    on_pause: Callable[[float], None] | None = None  # this process itself was away for so many seconds


class NeighbourWatch(Generic[Payload]):
    """Sends heartbeats and watches for those of the neighbours, on a thread of its own.

    Args:
        detector: the deciding part; this watch alone uses it from now on.
        interval_s: time between two heartbeats.
        payload: makes the heartbeat to send now.
        send: hands a heartbeat to the connection of a neighbour. It must return at once: one that blocks
            looks like a pause of this process.
        callbacks: see SilenceCallbacks.
    """

    def __init__(
        self,
        detector: SilenceDetector,
        interval_s: float,
        *,
        payload: Callable[[], Payload],
        send: Callable[[MemberId, Payload], None],
        callbacks: SilenceCallbacks,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self._detector = detector
        self._interval_s = interval_s
        self._payload = payload
        self._send = send
        self._callbacks = callbacks
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def set_members(self, members: Iterable[MemberId]) -> None:
        """All members of the job; the neighbours among them are found here."""
        with self._lock:
            self._detector.set_members(members, self._clock())

    def heard(self, member: MemberId) -> None:
        """A message of `member` arrived; to be called from the thread that read it."""
        with self._lock:
            verdict = self._detector.heard(member, self._clock())
        if verdict is not None:
            self._callbacks.on_return(member)

    def silent(self) -> tuple[MemberId, ...]:
        """Neighbours that count as dead for this observer now."""
        with self._lock:
            return self._detector.silent

    def ages_s(self) -> dict[MemberId, float]:
        """Seconds since each neighbour was heard."""
        with self._lock:
            return self._detector.ages_s(self._clock())

    def close(self) -> None:
        """Stop sending and watching."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("a callback of the neighbour watch did not return within %g s", _JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                verdicts = self._detector.tick(self._clock())
                paused_s = self._detector.paused_s
                watched = self._detector.watched
            if paused_s and self._callbacks.on_pause is not None:
                self._callbacks.on_pause(paused_s)
            for verdict in verdicts:
                self._tell(verdict)
            heartbeat = self._payload()
            for member in watched:
                self._send(member, heartbeat)
            if self._closing.wait(self._interval_s):
                return

    def _tell(self, verdict: Verdict) -> None:
        match verdict.change:
            case Change.SUSPECT:
                self._callbacks.on_suspect(verdict.member, verdict.age_s)
            case Change.SILENT:
                self._callbacks.on_silent(verdict.member, verdict.observers_needed)
            case Change.RETURNED:
                self._callbacks.on_return(verdict.member)
            case _ as never:
                assert_never(never)
