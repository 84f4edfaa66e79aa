"""The rendezvous server and its client."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from deadpool.communicator.extension import native
from deadpool.communicator.rendezvous import RendezvousStore
from deadpool.communicator.rendezvous_server import RendezvousServer
from deadpool.communicator.rendezvous_wire import MAX_FRAME_BYTES, Op, Request, encode_frame, take_requests
from deadpool.errors import CollectiveAborted

TOKEN = "job-token"
PROMPT_S = 5.0


class Rendezvous:
    """A server and the stores that a test opens on it."""

    def __init__(self) -> None:
        self.server = RendezvousServer("127.0.0.1", TOKEN)
        self.port = self.server.start()
        # Generations that this process closed before (other tests) stay closed.
        self.first = native.closed_generation() + 1
        self._stores: list[RendezvousStore] = []

    def store(self, generation: int = 0, *, timeout_s: float = 10.0, token: str = TOKEN) -> RendezvousStore:
        """A client; `generation` counts from the first that is open."""
        store = RendezvousStore(
            "127.0.0.1", self.port, token=token, generation=self.first + generation, timeout_s=timeout_s
        )
        self._stores.append(store)
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self.server.close()


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    served = Rendezvous()
    yield served
    served.close()


def test_values_come_back_as_they_were_set(rendezvous: Rendezvous) -> None:
    store = rendezvous.store()
    store.set("text", "häuser")
    store.set("raw", b"\x00\xff")
    store.append("raw", b"!")
    assert store.get("text") == "häuser".encode()
    assert store.multi_get(["raw", "text"]) == [b"\x00\xff!", "häuser".encode()]
    assert store.num_keys() == 2
    assert store.delete_key("raw")
    assert not store.check(["raw"])


def test_counters_and_compare_set_act_like_the_stock_store(rendezvous: Rendezvous) -> None:
    store, stock = rendezvous.store(), c10d.HashStore()
    for tried in (store, stock):
        assert tried.add("n", 3) == 3
        assert tried.add("n", -1) == 2
        assert tried.get("n") == b"2"
        assert tried.compare_set("k", "", "first") == b"first"
        assert tried.compare_set("k", "other", "second") == b"first"
        assert tried.compare_set("k", "first", "second") == b"second"


def test_a_wait_ends_when_the_key_arrives(rendezvous: Rendezvous) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous.store().get, "late")
        rendezvous.store().set("late", "x")
        assert waiting.result(PROMPT_S) == b"x"


def test_one_thread_waits_while_another_sets_through_the_same_store(rendezvous: Rendezvous) -> None:
    store = rendezvous.store()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["late"], timedelta(seconds=PROMPT_S))
        store.set("late", "x")
        waiting.result(PROMPT_S)


def test_a_wait_has_a_deadline_and_names_a_missing_key(rendezvous: Rendezvous) -> None:
    store = rendezvous.store()
    store.set("here", "x")
    with pytest.raises(dist.DistStoreError, match=r"1 of 2 keys missing.*'absent'"):
        store.wait(["here", "absent"], timedelta(seconds=0.1))


def test_a_key_of_one_generation_is_not_seen_in_the_next(rendezvous: Rendezvous) -> None:
    rendezvous.store(0).set("address", "old")
    assert not rendezvous.store(1).check(["address"])


def test_requests_of_an_older_generation_are_refused(rendezvous: Rendezvous) -> None:
    store = rendezvous.store(0)
    store.set("k", "v")
    rendezvous.server.set_generation(rendezvous.first + 1)
    rendezvous.store(1).set("new", "v")  # the server has heard by now
    with pytest.raises(CollectiveAborted, match="refuses generation"):
        store.set("k", "v")


def test_a_wait_of_an_older_generation_ends_when_the_server_moves_on(rendezvous: Rendezvous) -> None:
    store = rendezvous.store(0, timeout_s=60)
    store.set("ready", "x")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never")
        rendezvous.server.set_generation(rendezvous.first + 1)
        with pytest.raises(CollectiveAborted):
            waiting.result(PROMPT_S)


def test_a_close_ends_a_wait_of_that_generation(rendezvous: Rendezvous) -> None:
    store = rendezvous.store(0, timeout_s=60)
    store.set("ready", "x")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "never")
        native.close(store.generation)
        with pytest.raises(CollectiveAborted):
            waiting.result(PROMPT_S)
    rendezvous.store(1).set("k", "v")  # the next generation is served


def test_a_client_without_the_token_is_refused(rendezvous: Rendezvous) -> None:
    with pytest.raises(dist.DistNetworkError):
        rendezvous.store(token="guess", timeout_s=0.3).set("k", "v")


def test_a_missing_server_is_reported_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    generation = native.closed_generation() + 1
    store = RendezvousStore("127.0.0.1", port, token=TOKEN, generation=generation, timeout_s=0.2)
    with pytest.raises(dist.DistNetworkError, match=f"127.0.0.1:{port}"):
        store.get("k")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
    ],
    ids=["http", "huge", "no msgpack"],
)
def test_bytes_of_a_stranger_end_only_its_own_connection(rendezvous: Rendezvous, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", rendezvous.port), timeout=PROMPT_S) as stranger:
        stranger.sendall(garbage)
        assert stranger.recv(1) == b""
    rendezvous.store().set("k", "v")


def test_a_request_may_arrive_in_pieces() -> None:
    frame = encode_frame(Request(op=Op.ADD, generation=1, keys=["k"], number=2))
    buffer = bytearray()
    found = []
    for byte in frame + frame:
        buffer.append(byte)
        found += take_requests(buffer)
    assert [request.number for request in found] == [2, 2]
    assert not buffer


def test_many_clients_use_one_server(rendezvous: Rendezvous) -> None:
    barrier = threading.Barrier(8)

    def run(number: int) -> list[bytes]:
        store = rendezvous.store()
        barrier.wait(PROMPT_S)
        store.set(f"rank{number}", str(number))
        return store.multi_get([f"rank{other}" for other in range(8)])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8), timeout=20))
    assert results == [[str(other).encode() for other in range(8)]] * 8


def test_gloo_connects_through_the_store(rendezvous: Rendezvous) -> None:
    store = rendezvous.store()
    group = c10d.ProcessGroupGloo(c10d.PrefixStore("x", store), 0, 1, timedelta(seconds=10))
    assert group.size() == 1
    assert store.num_keys() > 0
