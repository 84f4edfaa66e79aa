"""Which hosts cannot be connected to."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from deadpool.liveness.reach import find_unreachable


@pytest.fixture
def full() -> Iterator[tuple[str, int]]:
    """A listener whose backlog is full: further connections get no answer, as from a host that is cut off."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    address: tuple[str, int] = listener.getsockname()
    first = socket.create_connection(address)
    yield address
    first.close()
    listener.close()


def test_a_host_that_answers_is_reached_also_if_it_refuses(full: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listening = listener.getsockname()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refusing = closed.getsockname()
        assert find_unreachable([listening, full, refusing], limit_s=0.2) == (1,)


def test_many_hosts_are_tried_in_turns() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        assert find_unreachable([listener.getsockname()] * 600) == ()


def test_nobody_is_asked_for_nothing() -> None:
    assert find_unreachable([]) == ()
