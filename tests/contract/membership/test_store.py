"""What every membership store promises, checked on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from deadpool.errors import LeaseLost, StoreUnavailable
from deadpool.membership.store import (
    Compare,
    KeyDeleted,
    KeyPut,
    KeyRange,
    MembershipStore,
    WatchConnected,
    WatchInterrupted,
    Write,
    has_value,
    is_absent,
    is_created_at,
    is_empty,
    is_modified_at,
    is_present,
    prefix_range,
)
from tests.contract.membership.support import EVENT_S, TTL_S, Backend, Recorder, run_at_once


def test_a_key_keeps_its_create_revision_and_changes_its_mod_revision(
    store: MembershipStore, prefix: str
) -> None:
    created = store.put(f"{prefix}a", b"1")
    modified = store.put(f"{prefix}a", b"2")

    pair = store.get(f"{prefix}a")

    assert pair is not None
    assert (pair.value, pair.create_revision, pair.mod_revision) == (b"2", created, modified)
    assert created < modified


def test_a_key_that_was_deleted_is_created_anew(store: MembershipStore, prefix: str) -> None:
    first = store.put(f"{prefix}a", b"1")
    assert store.delete(f"{prefix}a")
    assert store.get(f"{prefix}a") is None
    assert not store.delete(f"{prefix}a")

    second = store.put(f"{prefix}a", b"1")

    pair = store.get(f"{prefix}a")
    assert pair is not None
    assert pair.create_revision == second > first


def test_a_prefix_lists_its_keys_in_order_and_no_neighbour(store: MembershipStore, prefix: str) -> None:
    neighbours = [prefix[:-1], f"{prefix[:-1]}0", f"{prefix[:-2]}/x"]
    for key in [f"{prefix}b", *neighbours, f"{prefix}a", f"{prefix}a/c"]:
        last = store.put(key, b"")

    pairs, revision = store.get_prefix(prefix)

    assert [pair.key for pair in pairs] == [f"{prefix}a", f"{prefix}a/c", f"{prefix}b"]
    assert revision >= last
    assert store.delete_prefix(prefix) == 3
    assert all(store.get(key) is not None for key in neighbours)
    for key in neighbours:
        store.delete(key)


def test_a_transaction_applies_all_or_nothing(store: MembershipStore, prefix: str) -> None:
    before = store.put(f"{prefix}old", b"1")
    writes = [Write(key=f"{prefix}new", value=b"2"), Write(key=f"{prefix}newer", value=b"3")]
    deletes = [KeyRange(start=f"{prefix}old")]

    assert store.transaction([is_present(f"{prefix}missing")], writes, deletes) is None
    assert [pair.mod_revision for pair in store.get_prefix(prefix)[0]] == [before]

    revision = store.transaction([is_modified_at(f"{prefix}old", before)], writes, deletes)

    pairs, _ = store.get_prefix(prefix)
    assert [(pair.key, pair.mod_revision) for pair in pairs] == [
        (f"{prefix}new", revision),
        (f"{prefix}newer", revision),
    ]


def test_each_comparison_tells_true_from_false(store: MembershipStore, prefix: str) -> None:
    key, missing = f"{prefix}in/a", f"{prefix}in/missing"
    created = store.put(key, b"1")
    modified = store.put(key, b"2")

    def holds(compare: Compare) -> bool:
        return store.transaction([compare], [Write(key=f"{prefix}out", value=b"")]) is not None

    assert [holds(is_absent(each)) for each in (key, missing)] == [False, True]
    assert [holds(is_present(each)) for each in (key, missing)] == [True, False]
    assert [holds(is_created_at(key, each)) for each in (created, modified)] == [True, False]
    assert [holds(is_modified_at(key, each)) for each in (created, modified)] == [False, True]
    assert [holds(is_modified_at(missing, each)) for each in (0, modified)] == [True, False]
    assert [holds(has_value(key, each)) for each in (b"1", b"2")] == [False, True]
    assert not holds(has_value(missing, b""))
    assert [holds(is_empty(each)) for each in (f"{prefix}in/", f"{prefix}none/")] == [False, True]
    assert not holds(is_empty(f"{prefix}in"))


def test_of_racing_writers_exactly_one_wins_each_round(backend: Backend, prefix: str) -> None:
    n_writers, n_wins_each = 4, 5
    key = f"{prefix}counter"
    stores = [backend.open_store() for _ in range(n_writers)]
    stores[0].put(key, b"0")

    def count_up(store: MembershipStore) -> Callable[[], None]:
        def run() -> None:
            wins = 0
            while wins < n_wins_each:
                pair = store.get(key)
                assert pair is not None
                value = str(int(pair.value) + 1).encode()
                write = Write(key=key, value=value)
                wins += store.transaction([is_modified_at(key, pair.mod_revision)], [write]) is not None

        return run

    run_at_once([count_up(each) for each in stores])

    pair = stores[0].get(key)
    assert pair is not None
    assert int(pair.value) == n_writers * n_wins_each


def test_of_racing_creators_exactly_one_wins(backend: Backend, prefix: str) -> None:
    stores = [backend.open_store() for _ in range(4)]
    results: list[int | None] = []

    def create(store: MembershipStore) -> Callable[[], None]:
        write = Write(key=f"{prefix}leader", value=b"")
        return lambda: results.append(store.transaction([is_absent(write.key)], [write]))

    run_at_once([create(each) for each in stores])

    assert len([each for each in results if each is not None]) == 1
    assert len(results) == 4


def test_only_the_keys_of_a_lease_that_ends_go_with_it_and_asking_for_its_time_does_not_renew_it(
    backend: Backend, store: MembershipStore, prefix: str
) -> None:
    kept, lost = store.lease_grant(TTL_S), store.lease_grant(TTL_S)
    store.put(f"{prefix}kept", b"", kept.id)
    store.put(f"{prefix}lost", b"", lost.id)
    store.put(f"{prefix}unleased", b"")
    seen = Recorder()
    store.watch(prefix, seen)

    give_up_s = time.monotonic() + EVENT_S
    while store.get(f"{prefix}lost") is not None and time.monotonic() < give_up_s:
        assert store.lease_keepalive(kept.id) == kept.granted_ttl_s
        assert store.lease_remaining_s(lost.id) <= lost.granted_ttl_s
        backend.pass_time(TTL_S / 5)

    assert seen.wait_for(KeyDeleted).key == f"{prefix}lost"
    assert [pair.key for pair in store.get_prefix(prefix)[0]] == [f"{prefix}kept", f"{prefix}unleased"]
    assert store.lease_keepalive(lost.id) == 0
    assert store.lease_remaining_s(lost.id) == 0
    assert store.lease_remaining_s(kept.id) <= kept.granted_ttl_s
    store.lease_revoke(kept.id)
    assert [pair.key for pair in store.get_prefix(prefix)[0]] == [f"{prefix}unleased"]
    store.lease_revoke(kept.id)  # has ended already


def test_a_write_with_an_ended_lease_is_refused(store: MembershipStore, prefix: str) -> None:
    lease = store.lease_grant(TTL_S)
    store.lease_revoke(lease.id)

    with pytest.raises(LeaseLost):
        store.put(f"{prefix}a", b"", lease.id)
    with pytest.raises(LeaseLost):
        store.transaction([], [Write(key=f"{prefix}a", value=b"", lease=lease.id)])
    assert store.get(f"{prefix}a") is None


def test_a_watch_reports_what_is_there_in_order_of_writing_and_then_every_change(
    backend: Backend, store: MembershipStore, prefix: str
) -> None:
    other = backend.open_store()
    for key in ("b", "a"):
        store.put(f"{prefix}{key}", b"before")
    store.put(f"{prefix[:-1]}0", b"a neighbour")
    seen = Recorder()
    store.watch(prefix, seen)
    seen.wait_for(WatchConnected)

    other.put(f"{prefix}b", b"after")
    revision = other.transaction(
        [],
        [Write(key=f"{prefix}c", value=b""), Write(key=f"{prefix}d", value=b"")],
        [prefix_range(f"{prefix}a")],
    )
    other.put(f"{prefix}end", b"")

    seen.wait_for(KeyPut, lambda put: put.pair.key == f"{prefix}end")
    puts = [each.pair for each in seen.events if isinstance(each, KeyPut)]
    assert [pair.key.removeprefix(prefix) for pair in puts] == ["b", "a", "b", "c", "d", "end"]
    assert [type(each) for each in seen.events[:3]] == [KeyPut, KeyPut, WatchConnected]
    assert [each for each in seen.events if isinstance(each, KeyDeleted)] == [
        KeyDeleted(key=f"{prefix}a", revision=revision or 0)
    ]
    assert [pair.mod_revision for pair in puts[3:5]] == [revision, revision]
    store.delete(f"{prefix[:-1]}0")


def test_a_closed_watch_reports_nothing_more(store: MembershipStore, prefix: str) -> None:
    closed, open_ = Recorder(), Recorder()
    watch = store.watch(prefix, closed)
    store.watch(prefix, open_)
    for each in (closed, open_):
        each.wait_for(WatchConnected)

    watch.close()
    watch.close()
    store.put(f"{prefix}a", b"")

    open_.wait_for(KeyPut)
    assert not any(isinstance(each, KeyPut) for each in closed.events)


def test_a_watch_can_be_closed_from_its_own_callback(store: MembershipStore, prefix: str) -> None:
    seen = Recorder()

    def close_at_once(event: object) -> None:
        seen(event)
        if isinstance(event, KeyPut):
            watch.close()

    watch = store.watch(prefix, close_at_once)
    seen.wait_for(WatchConnected)
    store.put(f"{prefix}a", b"")
    store.put(f"{prefix}b", b"")

    seen.wait_for(KeyPut)
    assert len([each for each in seen.events if isinstance(each, KeyPut)]) == 1


def test_a_watch_that_was_cut_off_reports_what_it_missed_once_and_in_order(
    backend: Backend, store: MembershipStore, prefix: str
) -> None:
    other = backend.open_store()
    store.put(f"{prefix}a", b"1")
    seen = Recorder()
    store.watch(prefix, seen)
    seen.wait_for(WatchConnected)

    backend.cut_off(store)
    seen.wait_for(WatchInterrupted)
    n_before = len(seen.events)
    other.put(f"{prefix}a", b"2")
    other.put(f"{prefix}b", b"1")
    other.delete(f"{prefix}a")
    backend.let_back(store)
    other.put(f"{prefix}end", b"")

    seen.wait_for(KeyPut, lambda put: put.pair.key == f"{prefix}end")
    after = [each for each in seen.events[n_before:] if not isinstance(each, WatchInterrupted)]
    assert isinstance(after[0], WatchConnected)
    changes = [(type(each), getattr(each, "key", None) or each.pair.key) for each in after[1:]]
    assert changes == [
        (KeyPut, f"{prefix}a"),
        (KeyPut, f"{prefix}b"),
        (KeyDeleted, f"{prefix}a"),
        (KeyPut, f"{prefix}end"),
    ]


def test_a_watch_lists_again_after_the_history_it_missed_was_compacted(
    backend: Backend, store: MembershipStore, prefix: str
) -> None:
    other = backend.open_store()
    for key in ("same", "changed", "deleted", "recreated"):
        other.put(f"{prefix}{key}", b"1")
    seen = Recorder()
    store.watch(prefix, seen)
    seen.wait_for(WatchConnected)

    backend.cut_off(store)
    seen.wait_for(WatchInterrupted)
    n_before = len(seen.events)
    for key in ("deleted", "recreated"):
        other.delete(f"{prefix}{key}")
    for key in ("changed", "recreated", "new"):
        other.put(f"{prefix}{key}", b"2")
    backend.compact()
    backend.let_back(store)
    seen.wait_for(KeyPut, lambda put: put.pair.key == f"{prefix}new")
    other.put(f"{prefix}end", b"")

    seen.wait_for(KeyPut, lambda put: put.pair.key == f"{prefix}end")
    after = seen.events[n_before:]
    puts = [each.pair.key.removeprefix(prefix) for each in after if isinstance(each, KeyPut)]
    gone = [each.key.removeprefix(prefix) for each in after if isinstance(each, KeyDeleted)]
    assert (puts, gone) == (["changed", "recreated", "new", "end"], ["deleted"])


def test_a_client_that_is_cut_off_says_so_in_time_and_works_again_afterwards(
    backend: Backend, store: MembershipStore, prefix: str
) -> None:
    lease = store.lease_grant(TTL_S)
    seen = Recorder()
    store.watch(prefix, seen)
    seen.wait_for(WatchConnected)
    backend.cut_off(store)
    calls: list[Callable[[], object]] = [
        lambda: store.get(f"{prefix}a"),
        lambda: store.put(f"{prefix}a", b""),
        lambda: store.transaction([], [Write(key=f"{prefix}a", value=b"")]),
        lambda: store.lease_keepalive(lease.id),
    ]

    def expect_refusal(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(StoreUnavailable):
                call()

        return run

    began_s = time.monotonic()
    run_at_once([expect_refusal(call) for call in calls])
    assert time.monotonic() - began_s < 2.5

    backend.let_back(store)
    backend.open_store().put(f"{prefix}b", b"")  # the store itself may take a second to connect again
    seen.wait_for(KeyPut, lambda put: put.pair.key == f"{prefix}b")
    store.put(f"{prefix}c", b"")
    assert [isinstance(each, WatchInterrupted) for each in seen.events].count(True) == 1


def test_a_watch_that_begins_while_cut_off_catches_up(
    backend: Backend, store: MembershipStore, prefix: str
) -> None:
    other = backend.open_store()
    other.put(f"{prefix}a", b"")
    backend.cut_off(store)
    seen = Recorder()

    store.watch(prefix, seen)
    seen.wait_for(WatchInterrupted)
    backend.let_back(store)

    seen.wait_for(WatchConnected)
    assert [type(each) for each in seen.events] == [WatchInterrupted, KeyPut, WatchConnected]


def test_closing_a_store_ends_its_watches_and_refuses_further_calls(backend: Backend, prefix: str) -> None:
    store, other = backend.open_store(), backend.open_store()
    seen, heard = Recorder(), Recorder()
    store.watch(prefix, seen)
    other.watch(prefix, heard)
    seen.wait_for(WatchConnected)

    began_s = time.monotonic()
    store.close()
    store.close()

    assert time.monotonic() - began_s < 2.0
    n_events = len(seen.events)
    other.put(f"{prefix}a", b"")
    heard.wait_for(KeyPut)
    assert len(seen.events) == n_events
    with pytest.raises(StoreUnavailable):
        store.get(f"{prefix}a")
