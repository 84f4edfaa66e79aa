"""Writes that nobody waits for: tried again until they are in, or until their generation is over."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from deadpool.errors import Fenced, LeaseLost, MembershipError, StoreUnavailable
from deadpool.runtime.writer import JOIN_TIMEOUT_S, RegistryWriter
from tests.unit.runtime.support import WAIT_S, fail


@pytest.fixture
def writer() -> Iterator[RegistryWriter]:
    made = RegistryWriter(fail)
    yield made
    made.close()


class Write:
    """A write that fails as told, and says when it was tried."""

    def __init__(self, *failures: MembershipError, then_always: MembershipError | None = None) -> None:
        self._failures = list(failures)
        self._always = then_always
        self.tries: queue.Queue[int] = queue.Queue()
        self.n_tries = 0
        self.is_done = threading.Event()

    def __call__(self) -> None:
        self.n_tries += 1
        self.tries.put(self.n_tries)
        if self._failures:
            raise self._failures.pop(0)
        if self._always is not None:
            raise self._always
        self.is_done.set()


def test_a_write_is_tried_again_until_it_is_in_and_then_never_again(writer: RegistryWriter) -> None:
    first = Write(StoreUnavailable("away"), LeaseLost("not enrolled yet"))
    behind = Write()
    writer.put(1, "an ack", first)
    writer.put(1, "another ack", behind)
    assert behind.is_done.wait(WAIT_S)
    assert first.is_done.is_set()
    assert first.n_tries == 3


def test_writes_are_done_in_the_order_in_which_they_came(writer: RegistryWriter) -> None:
    done: queue.Queue[int] = queue.Queue()
    writer.put(1, "first", Write(StoreUnavailable("away")))
    for number in range(5):
        writer.put(1, "ack", partial(done.put, number))
    assert [done.get(timeout=WAIT_S) for _ in range(5)] == list(range(5))


def test_a_write_of_a_generation_that_is_over_is_given_up(writer: RegistryWriter) -> None:
    stuck = Write(then_always=StoreUnavailable("away"))
    late = Write()
    current = Write()
    writer.put(1, "an old ack", stuck)
    stuck.tries.get(timeout=WAIT_S)
    writer.set_generation(2)
    writer.put(1, "another old ack", late)
    writer.put(2, "an ack", current)
    assert current.is_done.wait(WAIT_S)
    assert late.n_tries == 0


def test_a_generation_never_goes_back(writer: RegistryWriter) -> None:
    old = Write()
    current = Write()
    writer.set_generation(3)
    writer.set_generation(2)
    writer.put(2, "an old ack", old)
    writer.put(3, "an ack", current)
    assert current.is_done.wait(WAIT_S)
    assert old.n_tries == 0


@pytest.mark.parametrize("error", [Fenced("replaced"), MembershipError("another version")])
def test_a_write_that_can_never_succeed_does_not_hold_back_the_others(
    writer: RegistryWriter, error: MembershipError
) -> None:
    hopeless = Write(then_always=error)
    behind = Write()
    writer.put(1, "an ack", hopeless)
    writer.put(1, "another ack", behind)
    assert behind.is_done.wait(WAIT_S)
    assert hopeless.n_tries == 1


def test_an_error_that_nobody_foresaw_is_told_and_ends_the_writer() -> None:
    """A writer that ended in silence would leave a host that never acks, and nobody who knows why."""
    told: queue.Queue[tuple[str, Exception]] = queue.Queue()
    writer = RegistryWriter(lambda what, error: told.put((what, error)))
    behind = Write()
    writer.put(1, "an ack", lambda: [].pop())
    writer.put(1, "another ack", behind)
    what, error = told.get(timeout=WAIT_S)
    writer.close()
    assert what == "an ack"
    assert isinstance(error, IndexError)
    assert behind.n_tries == 0


def test_what_is_queued_is_still_written_when_the_writer_closes() -> None:
    writer = RegistryWriter(fail)
    writes = [Write() for _ in range(3)]
    for write in writes:
        writer.put(1, "an ack", write)
    writer.close()
    assert all(write.is_done.is_set() for write in writes)


def test_closing_does_not_wait_for_a_store_that_stays_away() -> None:
    writer = RegistryWriter(fail)
    stuck = Write(then_always=StoreUnavailable("away"))
    writer.put(1, "an ack", stuck)
    stuck.tries.get(timeout=WAIT_S)
    began_s = time.monotonic()
    writer.close()
    assert time.monotonic() - began_s < JOIN_TIMEOUT_S / 2
    tries = stuck.n_tries
    writer.put(1, "too late", stuck)
    assert stuck.n_tries == tries
