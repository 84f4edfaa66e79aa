"""What a host listens with: communicator rendezvous, replica streams and fetches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deadpool.communicator.rendezvous_server import RendezvousServer
from deadpool.config import StoreConfig
from deadpool.core.types import MemberId, Name
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.replication import Replicator
from deadpool.store.tcp import TcpTransport
from deadpool.store.transport import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCallbacks:
    """What streams need and say; the last two from their own threads."""

    address_of: Callable[[MemberId], Address | None]
    held: Callable[[int, Name], None]  # one holder has it
    failed: Callable[[int, Name, str], None]


class Servers:
    """Starts them all, and closes them in order.

    Args:
        address: address to listen on.
        token: the job's token.
        memory: host memory store.
        config: deadlines of streams.
        callbacks: see StreamCallbacks.
    """

    def __init__(
        self,
        address: str,
        token: str,
        memory: HostMemoryStore,
        config: StoreConfig,
        callbacks: StreamCallbacks,
    ) -> None:
        self.rendezvous = RendezvousServer(address, token)
        self.rendezvous_port = self.rendezvous.start()
        self.transport = TcpTransport(token, bind_host=address)
        self.data = DataServer(memory, self.transport)
        _, self.data_port = self.data.start()
        self.replicator = Replicator(
            memory,
            self.transport,
            address_of=callbacks.address_of,
            on_held=callbacks.held,
            on_failed=callbacks.failed,
            timeout_s=lambda n_bytes: config.transfer_timeout_s + n_bytes / config.floor_rate_bytes_s,
        )
        self.replicator.start()

    @property
    def bytes_sent(self) -> int:
        return self.replicator.metrics.as_dict().get("bytes_sent", 0)

    def close(self) -> None:
        self.replicator.close()
        self.transport.close()
        self.rendezvous.close()
