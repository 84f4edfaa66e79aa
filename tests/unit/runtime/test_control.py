"""Control connections between agents: who is let in, what arrives, and who is gone."""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time

import msgspec
import pytest

from deadpool.core.types import Name
from deadpool.runtime import control
from deadpool.runtime.ipc import CONTROL_FRAME_BYTES
from deadpool.runtime.messages import (
    Heartbeat,
    Relay,
    ShardWritten,
    StallQuery,
    StatusReply,
    StatusRequest,
)
from deadpool.store.checkpoint import Shard
from tests.unit.runtime.planes import STATUS, Plane, dial, frame, hello, is_hung_up, planes
from tests.unit.runtime.support import TOKEN, WAIT_S, make_member, pattern, wait_until

HEARTBEAT = Heartbeat(member="a", generation=1, view_revision=3, reaches_store=True)


def test_a_message_reaches_the_peer_it_is_for_with_the_name_of_its_sender() -> None:
    with planes("a", "b", "c") as (a, b, c):
        shard = Shard(rank=1, file="rank-1.shard", n_bytes=10, checksum=5)
        message = ShardWritten(generation=2, name=Name(step=7, generation=2), shard=shard)
        a.control.send("b", message)
        assert b.next() == ("a", message)
        assert c.heard.empty()


def test_messages_to_one_peer_arrive_in_order_however_long_they_are() -> None:
    sent = [Relay(sender="a", generation=n, kind="Naming", body=pattern(n * 40_000, n)) for n in range(20)]
    with planes("a", "b") as (a, b):
        for message in sent:
            a.control.send("b", message)
        assert [b.next() for _ in sent] == [("a", message) for message in sent]


def test_heartbeats_arrive_beside_messages() -> None:
    with planes("a", "b") as (a, b):
        a.control.send("b", HEARTBEAT)
        a.control.send("b", StallQuery(generation=1))
        arrived = [message for _, message in (b.next(), b.next())]
        assert HEARTBEAT in arrived
        assert StallQuery(generation=1) in arrived


def test_a_broadcast_reaches_every_peer() -> None:
    with planes("a", "b", "c") as (a, b, c):
        a.control.broadcast(StallQuery(generation=4))
        assert b.next() == c.next() == ("a", StallQuery(generation=4))


def test_a_message_to_somebody_unknown_is_dropped_in_silence() -> None:
    with planes("a", "b") as (a, b):
        a.control.send("nobody", StallQuery(generation=1))
        a.control.send("b", StallQuery(generation=2))
        assert b.next() == ("a", StallQuery(generation=2))
        assert a.gone.empty()


def test_a_peer_that_is_no_member_any_more_hears_nothing() -> None:
    with planes("a", "b", "c") as (a, b, c):
        a.control.send("b", StallQuery(generation=1))
        b.next()
        a.knows(c)
        a.control.send("b", StallQuery(generation=2))
        a.control.send("c", StallQuery(generation=2))
        c.next()
        a.knows(b, c)
        a.control.send("b", StallQuery(generation=3))
        assert b.next() == ("a", StallQuery(generation=3))


# ---- who is let in ---------------------------------------------------------------------------------------


def test_a_hello_with_another_token_is_hung_up_on() -> None:
    with planes("a") as (a,):
        with dial(a.member.control_port) as (sock, channel):
            channel.send(hello(token="guess"))
            with contextlib.suppress(ConnectionError):
                channel.send(StallQuery(generation=1))
            assert is_hung_up(sock)
        assert a.heard.empty()


def test_a_plane_of_another_job_is_not_heard() -> None:
    stranger = Plane("b", token="token of another job")
    with planes("a", "c") as (a, c):
        stranger.knows(a)
        try:
            stranger.control.send("a", StallQuery(generation=1))
            c.control.send("a", StallQuery(generation=2))
            assert a.next() == ("c", StallQuery(generation=2))
        finally:
            stranger.control.close()
        assert a.heard.empty()


def test_whoever_does_not_introduce_itself_first_is_hung_up_on() -> None:
    with planes("a") as (a,):
        with dial(a.member.control_port) as (sock, channel):
            channel.send(StallQuery(generation=1))
            assert is_hung_up(sock)
        assert a.heard.empty()


def test_a_status_request_is_answered_and_the_connection_ends() -> None:
    with planes("a") as (a,), dial(a.member.control_port) as (sock, channel):
        channel.send(StatusRequest(token=TOKEN))
        assert channel.receive() == StatusReply(body=STATUS)
        assert is_hung_up(sock)


def test_a_status_request_with_another_token_is_not_answered() -> None:
    with planes("a") as (a,), dial(a.member.control_port) as (sock, channel):
        channel.send(StatusRequest(token="guess"))
        assert is_hung_up(sock)


@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
        b"\xff" * 64,
        frame(b"\xc1"),
        frame(b""),
        frame(msgspec.msgpack.encode({"type": "Hello", "member": 1, "token": [], "generation": "x"})),
        struct.pack(">I", CONTROL_FRAME_BYTES + 1) + b"x",
    ],
)
def test_hostile_bytes_end_their_own_connection_and_nothing_else(hostile: bytes) -> None:
    with planes("a", "b") as (a, b):
        b.control.send("a", StallQuery(generation=1))
        a.next()
        with dial(a.member.control_port) as (sock, _):
            sock.sendall(hostile)
            assert is_hung_up(sock)
        b.control.send("a", StallQuery(generation=2))
        assert a.next() == ("b", StallQuery(generation=2))
        assert a.gone.empty()


def test_who_introduces_itself_one_byte_at_a_time_is_hung_up_on_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is one of the whole: a byte now and then would hold a thread for days."""
    monkeypatch.setattr(control, "HELLO_TIMEOUT_S", 0.4)
    with planes("a") as (a,), dial(a.member.control_port) as (sock, _):
        sock.settimeout(0.1)
        sock.sendall(struct.pack(">I", 1 << 20))
        began_s = time.monotonic()
        while time.monotonic() - began_s < WAIT_S:
            try:
                sock.sendall(b".")
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - began_s < 4.0


def test_garbage_behind_a_good_hello_ends_the_connection_but_not_the_peer() -> None:
    with planes("a", "b") as (a, b):
        with dial(a.member.control_port) as (sock, channel):
            channel.send(hello("b"))
            channel.send(StallQuery(generation=1))
            assert a.next() == ("b", StallQuery(generation=1))
            sock.sendall(frame(b"\xc1"))
            assert is_hung_up(sock)
        b.control.send("a", StallQuery(generation=2))
        assert a.next() == ("b", StallQuery(generation=2))
        assert a.gone.empty()


# ---- who is gone, and the end ----------------------------------------------------------------------------


def test_a_peer_that_listens_no_more_is_gone_as_soon_as_its_connection_ends() -> None:
    with planes("a", "b") as (a, b):
        b.control.send("a", StallQuery(generation=1))
        a.next()
        b.control.close()
        assert a.gone.get(timeout=WAIT_S) == "b"


def test_a_peer_whose_host_refuses_the_first_connection_is_gone() -> None:
    with planes("a", "b") as (a, b):
        b.control.close()
        a.control.send("b", StallQuery(generation=1))
        assert a.gone.get(timeout=WAIT_S) == "b"


def test_a_connection_that_breaks_is_made_again_and_its_peer_is_not_gone() -> None:
    with planes("a", "b") as (a, b):
        with dial(a.member.control_port) as (_, channel):
            channel.send(hello("b"))
            channel.send(StallQuery(generation=1))
            a.next()
        # The end of that connection makes `a` look after `b`, which still listens.
        a.control.send("b", StallQuery(generation=2))
        assert b.next() == ("a", StallQuery(generation=2))
        assert a.gone.empty()


def test_closing_ends_the_listener_and_the_threads_of_all_connections_made() -> None:
    with planes("a", "b") as (a, b):
        a.control.send("b", HEARTBEAT)
        a.control.send("b", StallQuery(generation=1))
        b.next()
        b.next()
        a.control.close()
        left = [thread.name for thread in threading.enumerate() if thread.name.endswith("-b")]
        assert left == []
        with pytest.raises(ConnectionRefusedError), dial(a.member.control_port):
            pass
        a.control.send("b", StallQuery(generation=2))  # allowed, and nothing
        assert b.heard.empty()


def test_closing_does_not_wait_for_a_peer_that_does_not_read() -> None:
    with planes("a") as (a,), dial(a.member.control_port) as (_, channel):
        channel.send(hello("b"))
        channel.send(StallQuery(generation=1))
        a.next()
        closer = threading.Thread(target=a.control.close)
        closer.start()
        closer.join(WAIT_S / 2)
        assert not closer.is_alive()


def _await_connection() -> None:
    wait_until(
        lambda: any(thread.name == "control-in" for thread in threading.enumerate()), "the plane accepts"
    )


def test_closing_hangs_up_on_whoever_has_not_introduced_itself() -> None:
    with planes("a") as (a,), dial(a.member.control_port) as (sock, _):
        _await_connection()
        a.control.close()
        sock.settimeout(1.0)
        assert is_hung_up(sock)


def test_a_closed_plane_hears_nobody() -> None:
    with planes("a") as (a,), dial(a.member.control_port) as (_, channel):
        _await_connection()
        a.control.close()
        with contextlib.suppress(ConnectionError):
            channel.send(hello("b"))
            channel.send(StallQuery(generation=1))
        with pytest.raises(queue.Empty):
            a.heard.get(timeout=1.0)


def test_a_peer_without_an_address_that_answers_costs_no_thread_after_the_close() -> None:
    with planes("a") as (a,):
        a.control.set_peers({"z": make_member("z", control_port=1)})  # nobody listens there
        a.control.send("z", StallQuery(generation=1))
        assert a.gone.get(timeout=WAIT_S) == "z"
        a.control.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("-z")]
