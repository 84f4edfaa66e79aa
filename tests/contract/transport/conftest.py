from __future__ import annotations

from collections.abc import Iterator

import pytest

from deadpool.store.in_process import InProcessNetwork, InProcessTransport
from deadpool.store.tcp import TcpTransport
from deadpool.store.transport import Transport
from tests.contract.transport.support import Hosts


@pytest.fixture(params=["in-process", "tcp"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    network = InProcessNetwork()

    def make_transport() -> Transport:
        return TcpTransport("token of the job") if request.param == "tcp" else InProcessTransport(network)

    made = Hosts(make_transport)
    yield made
    made.close()
