"""A copy counts as held once every holder of its rank has it. Real stores, in-process streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deadpool.core.types import MemberId, Name
from deadpool.runtime.push import HolderPusher
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.in_process import InProcessNetwork, InProcessTransport
from deadpool.store.replication import Replicator
from deadpool.store.segment import SegmentKind
from deadpool.store.transport import Address
from tests.unit.runtime.support import LAYOUT, Loop, fill

ZERO = Name(step=0, generation=1)
ONE = Name(step=1, generation=1)


class Owner:
    """A host with rank 0, its pusher, and the holders that it may push to."""

    def __init__(self) -> None:
        network = InProcessNetwork()
        self.loop = Loop()
        self.held: list[tuple[int, Name]] = []
        self.failed: list[tuple[int, Name, str]] = []
        self.holders: dict[MemberId, HostMemoryStore] = {}
        self.addresses: dict[MemberId, Address] = {}
        for member in ("b", "c"):
            self.holders[member] = HostMemoryStore(member)
            server = DataServer(self.holders[member], InProcessTransport(network))
            server.set_generation(1, ZERO)
            self.addresses[member] = server.start()
        self.store = HostMemoryStore("a")
        segment = self.store.create_own(0, LAYOUT)
        segment.write_once(b"record")
        fill(segment, 0, ZERO)
        fill(segment, 1, ONE)
        self.replicator = Replicator(
            self.store,
            InProcessTransport(network),
            address_of=self.addresses.get,
            on_held=lambda rank, name: self.loop.post(self.pusher.acked, rank, name),
            on_failed=lambda rank, name, why: self.loop.post(self._on_failed, rank, name, why),
        )
        self.replicator.set_generation(1)
        self.pusher = HolderPusher(self.replicator, lambda rank, name: self.held.append((rank, name)))

    def has_copy(self, member: MemberId, name: Name) -> bool:
        """Whether a holder has it, byte for byte."""
        own, held = self.store.own(0), self.holders[member].held(0)
        if own is None or held is None:
            return False
        mine, theirs = own.bank_of(name), held.bank_of(name)
        if mine is None or theirs is None:
            return False
        return bytes(own.unique_view(mine)) == bytes(held.unique_view(theirs))

    def close(self) -> None:
        self.replicator.close()
        for store in (self.store, *self.holders.values()):
            store.close()

    def _on_failed(self, rank: int, name: Name, why: str) -> None:
        self.failed.append((rank, name, why))


@pytest.fixture
def idle_owner() -> Iterator[Owner]:
    """Its pushes wait until the replicator is started."""
    owner = Owner()
    yield owner
    owner.close()


@pytest.fixture
def owner(idle_owner: Owner) -> Owner:
    idle_owner.replicator.start()
    return idle_owner


def test_with_one_holder_a_copy_is_held_once_it_is_there(owner: Owner) -> None:
    owner.pusher.push(0, ZERO, 0, ("b",), None)
    owner.loop.run_until(lambda: bool(owner.held), "the answer of the holder")
    assert owner.held == [(0, ZERO)]
    assert owner.has_copy("b", ZERO)


def test_with_two_holders_a_copy_is_held_only_when_both_have_it(owner: Owner) -> None:
    owner.pusher.push(0, ZERO, 0, ("b", "c"), None)
    owner.loop.run_until(lambda: owner.loop.n_run == 1, "the first answer")
    assert owner.held == []
    owner.loop.run_until(lambda: owner.loop.n_run == 2, "the second answer")
    assert owner.held == [(0, ZERO)]
    assert owner.has_copy("b", ZERO)
    assert owner.has_copy("c", ZERO)


def test_a_copy_that_one_of_two_holders_never_gets_is_never_held(owner: Owner) -> None:
    owner.addresses.pop("c")
    owner.pusher.push(0, ZERO, 0, ("b", "c"), None)
    owner.loop.run_until(lambda: owner.loop.n_run == 2, "an answer and a failure")
    assert owner.held == []
    assert [(rank, name) for rank, name, _ in owner.failed] == [(0, ZERO)]
    assert "c" in owner.failed[0][2]


def test_without_holders_a_copy_counts_as_held_at_once(owner: Owner) -> None:
    owner.pusher.push(0, ZERO, 0, (), None)
    assert owner.held == [(0, ZERO)]


def test_an_answer_to_a_push_that_was_given_up_does_not_count_for_the_next(owner: Owner) -> None:
    owner.pusher.push(0, ZERO, 0, ("b", "c"), None)
    owner.pusher.push(0, ONE, 1, ("b", "c"), ZERO)
    owner.loop.run_until(lambda: owner.loop.n_run == 3, "both answers for the first, one for the second")
    assert owner.held == []
    owner.loop.run_until(lambda: owner.loop.n_run == 4, "the last answer")
    assert owner.held == [(0, ONE)]


def test_a_copy_is_held_once_however_often_a_holder_answers(owner: Owner) -> None:
    owner.pusher.push(0, ZERO, 0, ("b",), None)
    owner.loop.run_until(lambda: bool(owner.held), "the answer of the holder")
    owner.pusher.acked(0, ZERO)
    assert owner.held == [(0, ZERO)]


def test_a_push_that_was_stopped_before_it_began_is_never_sent(idle_owner: Owner) -> None:
    owner = idle_owner
    owner.pusher.push(0, ZERO, 0, ("b",), None)
    owner.pusher.stop(0, 0)
    owner.pusher.push(0, ZERO, 0, ("c",), None)
    owner.replicator.start()
    owner.loop.run_until(lambda: bool(owner.held), "the answer of the other holder")
    assert owner.held == [(0, ZERO)]
    assert owner.holders["b"].banks(0, SegmentKind.HELD) == ()
    assert owner.has_copy("c", ZERO)
