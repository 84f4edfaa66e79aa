"""Processes killed in the middle: what they left behind never counts. Over TCP, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deadpool.store.segment import BankState, Segment, SegmentKind
from deadpool.store.tcp import TcpTransport
from deadpool.store.transport import Address
from tests.contract.transport.support import MIB, Host, Hosts, fill, layout, name, wait_until

SENDER = """
import sys
from deadpool.core.types import Name
from deadpool.store.checksum import CHUNK_BYTES
from deadpool.store.segment import Segment, SegmentLayout
from deadpool.store.tcp import TcpTransport
from deadpool.store.transport import Area, Lane, StreamHeader

layout = SegmentLayout(once_bytes=3000, blob_capacity=4096, unique_bytes=4 << 20, replicated_bytes=5000)
segment = Segment.create("sender", layout)

class Source:
    areas = [(Area.ONCE, segment.once_view()[:100]), (Area.BLOB, segment.blob_view(0)[:4]),
             (Area.UNIQUE, segment.unique_view(0))]
    n_sent = 0
    def check(self):
        if self.n_sent > 2 * CHUNK_BYTES:
            print("half", flush=True)
            sys.stdin.read()
    def on_cancel(self, hook): pass
    def sent(self, n_bytes): self.n_sent += n_bytes
    def chunk_sent(self, area, digest): pass

header = StreamHeader(rank=0, name=Name(step=2, generation=0), generation=0, keep=Name(step=1, generation=0),
                      layout=layout, blob_len=4, once_len=int(sys.argv[2]), once_checksum=int(sys.argv[3]))
address = ("127.0.0.1", int(sys.argv[1]))
TcpTransport("token of the job").push(address, header, Source(), lane=Lane.BULK, timeout_s=30)
"""

CAPTURER = """
import sys
from deadpool.core.types import Name
from deadpool.store.segment import Segment

segment = Segment.attach(int(sys.argv[1]))
segment.begin(1, Name(step=1, generation=0))
segment.unique_view(1)[: 1000] = bytes([7]) * 1000
print("half", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tcp_hosts() -> Iterator[Hosts]:
    made = Hosts(lambda: TcpTransport("token of the job"))
    yield made
    made.close()


def run_until_half(script: str, *arguments: object, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


def hold_two(hosts: Hosts) -> tuple[Host, Host, Segment, Address]:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    segment = owner.make_own(0, layout(4 * MIB))
    for bank, of, keep in ((0, name(0), None), (1, name(1), name(0))):
        fill(segment, bank, of)
        owner.replicator.push_captured(0, of, bank, "holder", keep)
        assert owner.await_held() == of
    return owner, holder, segment, holder.address


def test_a_sender_killed_in_mid_stream_leaves_nothing_that_counts(tcp_hosts: Hosts) -> None:
    owner, holder, segment, address = hold_two(tcp_hosts)

    process = run_until_half(SENDER, address[1], segment.once_len, segment.once_checksum)
    states = {info.state for info in holder.store.banks(0, SegmentKind.HELD)}
    assert states == {BankState.COMPLETE, BankState.WRITING}
    kill(process)

    wait_until(lambda: not holder.store.leases, "the holder lets go of the bank")
    assert holder.held_names() == (name(1),)
    fill(segment, 0, name(2))
    owner.replicator.push_captured(0, name(2), 0, "holder", name(1))
    assert owner.await_held() == name(2)
    assert set(holder.held_names()) == {name(1), name(2)}


def test_a_stream_replaces_one_whose_sender_fell_silent(tcp_hosts: Hosts) -> None:
    owner, holder, segment, address = hold_two(tcp_hosts)

    process = run_until_half(SENDER, address[1], segment.once_len, segment.once_checksum)
    try:
        fill(segment, 0, name(2))
        owner.replicator.push_captured(0, name(2), 0, "holder", name(1))
        assert owner.await_held() == name(2)
    finally:
        kill(process)
    wait_until(lambda: not holder.store.leases, "the holder lets go of the bank")
    assert set(holder.held_names()) == {name(1), name(2)}


def test_a_worker_killed_in_mid_capture_leaves_its_other_copy(tcp_hosts: Hosts) -> None:
    owner = tcp_hosts.add("owner")
    segment = owner.make_own(0, layout(MIB))
    fill(segment, 0, name(0))
    before = bytes(segment.unique_view(0))

    descriptor = os.dup(segment.fd)
    process = run_until_half(CAPTURER, descriptor, pass_fds=(descriptor,))
    os.close(descriptor)
    kill(process)

    assert segment.bank_info(1).state is BankState.WRITING
    assert owner.store.inventory().copies[0].own == (name(0),)
    assert segment.unique_view(0) == before
    owner.store.empty_newer_than(name(0))
    assert segment.bank_info(1).state is BankState.EMPTY
    assert segment.bank_info(0).complete_name == name(0)
