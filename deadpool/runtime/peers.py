"""The other hosts, as this one sees them: heartbeats, silence, and who reaches the control plane.

Threads of the connections and of the neighbour watch hand over through `post`; everything else runs on the
agent's main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from deadpool.config import Config
from deadpool.core.types import Member, MemberId
from deadpool.events import EventLog
from deadpool.liveness.neighbour import NeighbourWatch, SilenceCallbacks, SilenceDetector
from deadpool.runtime.control import ControlCallbacks, ControlPlane
from deadpool.runtime.messages import Control, Heartbeat, Hello, Silent

REPEAT_S = 1.0
LAST_WORDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersCallbacks:
    """What the agent hears and is asked."""

    post: Callable[..., None]  # runs a function on the main thread
    heartbeat: Callable[[], Heartbeat]  # any thread
    message: Callable[
        [MemberId, Control], None
    ]  # main thread; heartbeats that bring nothing new are left out
    silent: Callable[[Silent], None]  # main thread: an observation, one's own or a peer's
    status: Callable[[], bytes]  # any thread


class Peers:
    """Connections to all members, and the watch over the neighbours among them.

    Args:
        member: this incarnation.
        address: address to listen on.
        token: the job's token.
        config: configuration of the job.
        log: event log.
        callbacks: see PeersCallbacks.
    """

    def __init__(
        self,
        member: MemberId,
        address: str,
        token: str,
        config: Config,
        log: EventLog,
        callbacks: PeersCallbacks,
    ) -> None:
        self.suspects: set[MemberId] = set()
        self._member = member
        self._silence_dead_s = config.liveness.silence_dead_s
        self._log = log
        self._callbacks = callbacks
        self._known: set[MemberId] = set()
        self._gone: set[MemberId] = set()  # their hosts said that no such process exists
        self._silent: set[MemberId] = set()  # not heard for silence_dead_s
        self._repeat_at_s = 0.0
        self._last_words = 0  # repetitions left of "I hear everybody"
        self._is_over = False
        self._reaches: dict[MemberId, tuple[float, bool]] = {}  # when heard, and whether it reaches the store
        self._control = ControlPlane(
            address,
            token,
            lambda: Hello(member=member, token=token, generation=callbacks.heartbeat().generation),
            ControlCallbacks(
                message=self._on_message,
                gone=lambda peer: callbacks.post(self._observe, peer, True),
                status=callbacks.status,
            ),
        )
        self._neighbours = NeighbourWatch(
            SilenceDetector(config.liveness, member),
            config.liveness.heartbeat_interval_s,
            payload=callbacks.heartbeat,
            send=self._control.send,
            callbacks=SilenceCallbacks(
                on_suspect=lambda peer, age_s: callbacks.post(self._on_suspect, peer, age_s),
                on_silent=lambda peer, observers: callbacks.post(self._observe, peer, False),
                on_return=lambda peer: callbacks.post(self._on_return, peer),
                on_pause=lambda late_s: log.emit("liveness.paused", late_s=late_s),
            ),
        )

    def listen(self) -> int:
        """Accept connections; returns the port."""
        return self._control.start()

    def start_watching(self) -> None:
        self._neighbours.start()

    def close(self) -> None:
        self._neighbours.close()
        self._control.close()

    def set_members(self, members: Mapping[MemberId, Member]) -> None:
        """The members that exist now."""
        self._known = set(members)
        # What was observed stays: a lost leader's lease is ended at once, and the next one must hear of it.
        self.suspects &= self._known
        for member in [member for member in list(self._reaches) if member not in self._known]:
            if not self._is_fresh(member):
                self._reaches.pop(member, None)
        self._control.set_peers({key: value for key, value in members.items() if key != self._member})
        self._neighbours.set_members(members)

    def stop_judging(self) -> None:
        """The end has begun: hosts that leave are no news. Who is `unheard` is still known."""
        self._is_over = True

    def repeat_observations(self) -> None:
        """Another member leads now: it knows nothing of what was said to the one before."""
        if self._gone or self._silent:
            self._say(self._known)

    def tick(self, leader: MemberId, named: Collection[MemberId]) -> None:
        """Say again what is not heard: a message may be lost with its connection.

        Args:
            leader: who judges; if it is the silent one, or nobody leads, all members hear of it.
            named: members that the View names; one that is silent and not registered any more still counts.
        """
        now_s = time.monotonic()
        if now_s < self._repeat_at_s or self._is_over:
            return
        self._repeat_at_s = now_s + REPEAT_S
        unregistered = set(named) - self._known
        self._gone &= self._known | unregistered
        self._silent = (self._silent & unregistered) | set(self._neighbours.silent())
        accused = self._gone | self._silent
        if accused:
            self._last_words = LAST_WORDS
        elif self._last_words:
            self._last_words -= 1
        else:
            return
        self._say({leader} if leader in self._known - accused else self._known)

    def send(self, member: MemberId, message: Control) -> None:
        self._control.send(member, message)

    def broadcast(self, message: Control) -> None:
        self._control.broadcast(message)

    def unheard(self) -> frozenset[MemberId]:
        """Members that this host has observed to be gone, or silent."""
        return frozenset(self._gone | self._silent)

    def hears_none_of(self, members: Collection[MemberId]) -> bool:
        """Whether it watches some of them, and all that it watches are gone or silent."""
        watched = set(members) & (set(self._reaches) & self._known | self.unheard())
        return bool(watched) and watched <= self.unheard()

    def who_reaches_store(self) -> tuple[bool, bool]:
        """(some peer was heard lately, some peer heard lately reaches the control plane). Any thread.

        Without another member there is nobody to be heard, who could have taken this one's place. Who was
        heard counts whether registered or not: after an outage registrations go before they come again.
        """
        fresh = [reaches for member, (_, reaches) in list(self._reaches.items()) if self._is_fresh(member)]
        is_alone = not self._known - {self._member}
        return bool(fresh) or is_alone, any(fresh)

    def _is_fresh(self, member: MemberId) -> bool:
        """Whether a heartbeat of it came lately."""
        seen_s, _ = self._reaches.get(member, (float("-inf"), False))
        return time.monotonic() - seen_s < self._silence_dead_s

    # ---- observations --------------------------------------------------------------------------------

    def _on_message(self, sender: MemberId, message: Control) -> None:
        """Connection thread."""
        self._neighbours.heard(sender)
        if isinstance(message, Heartbeat):
            self._reaches[sender] = (time.monotonic(), message.reaches_store)
            if message.view_revision <= self._callbacks.heartbeat().view_revision:
                return
        if isinstance(message, Silent):
            self._callbacks.post(self._callbacks.silent, message)
        else:
            self._callbacks.post(self._callbacks.message, sender, message)

    def _observe(self, peer: MemberId, gone: bool) -> None:
        """This host's own observation: said to all, because the silent one may be the leader."""
        if peer not in self._known or peer in self._gone:
            return
        (self._gone if gone else self._silent).add(peer)
        if self._is_over:
            return  # kept all the same: whose copies are saved at the end depends on it
        if gone:
            self._log.emit("liveness.gone", subject=peer)
        else:
            self._log.emit("liveness.silent", subject=peer, age_s=self._silence_dead_s)
        self._say(self._known)

    def _on_suspect(self, peer: MemberId, age_s: float) -> None:
        self.suspects.add(peer)
        self._log.emit("liveness.suspect", subject=peer, age_s=age_s)

    def _on_return(self, peer: MemberId) -> None:
        self.suspects.discard(peer)
        self._silent.discard(peer)
        self._log.emit("liveness.returned", subject=peer)
        self._say(self._known)

    def _say(self, to: Collection[MemberId]) -> None:
        message = Silent(
            observer=self._member,
            generation=self._callbacks.heartbeat().generation,
            silent=tuple(sorted(self._silent - self._gone)),
            gone=tuple(sorted(self._gone)),
        )
        for other in set(to) - self._gone - self._silent - {self._member}:
            self._control.send(other, message)
        self._callbacks.silent(message)
