"""Messages between agents that are not heartbeats: commit, stalls, shards. On the agent's main thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deadpool.core.types import MemberId, Name
from deadpool.runtime.checkpointing import CheckpointTier
from deadpool.runtime.leadership import Leadership
from deadpool.runtime.messages import Control, Relay, ShardWritten, Stalled, StallQuery
from deadpool.runtime.peers import Peers
from deadpool.runtime.protection import Protection
from deadpool.runtime.stalls import Finding, Stalls
from deadpool.store.checkpoint import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipients:
    """Who gets what arrives."""

    protection: Protection
    leadership: Leadership
    checkpoints: CheckpointTier
    stalls: Stalls
    completer: Callable[[], MemberId]  # of checkpoints


class Courier:
    """Sends to other agents, or to the same place in this one.

    Args:
        member: this incarnation.
        peers: connections.
        to: see Recipients.
        generation: the generation this agent is in.
        post: runs a function on the main thread: a message to oneself must not overtake its sender.
    """

    def __init__(
        self,
        member: MemberId,
        peers: Peers,
        to: Recipients,
        generation: Callable[[], int],
        post: Callable[..., None],
    ) -> None:
        self._member = member
        self._peers = peers
        self._to = to
        self._generation = generation
        self._post = post

    def on_message(self, sender: MemberId, message: Control) -> None:
        """Something arrived. What belongs to another generation changes nothing."""
        match message:
            case Relay(generation=generation):
                if generation == self._generation():
                    self._to.protection.relayed(message)
            case Stalled():
                self._to.leadership.act(lambda leader: leader.stalled(message))
            case StallQuery(generation=generation):
                if generation == self._generation():
                    self.report(Finding.WAITING)
            case ShardWritten():  # a checkpoint needs no View, so also while a leader cannot act
                self._to.checkpoints.shard_written(message.name, message.shard)
            case _:
                pass

    def send(self, member: MemberId, message: Control) -> None:
        """To a member, possibly this one; to nobody if nobody is meant ("")."""
        if member == self._member:
            self._post(self.on_message, member, message)
        elif member:
            self._peers.send(member, message)

    def query_stall(self, generation: int) -> None:
        """Leader: ask every host who makes no progress."""
        self._peers.broadcast(StallQuery(generation=generation))
        self.report(Finding.WAITING)

    def report(self, finding: Finding) -> None:
        """Tell the leader what the workers' pages say, if there is something to tell."""
        if finding is not Finding.NOTHING:
            report = self._to.stalls.report(self._generation(), is_late=finding is Finding.LATE)
            self.send(self._to.leadership.leader_id, report)

    def shard_written(self, name: Name, shard: Shard) -> None:
        """A shard of this host is durable: whoever completes the checkpoint waits for it."""
        message = ShardWritten(generation=self._generation(), name=name, shard=shard)
        self.send(self._to.completer(), message)
