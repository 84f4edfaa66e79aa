"""etcd itself fails: killed, frozen, back with old data, one of three lost, absent. Members stay members."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.errors import ConfigError, StoreUnavailable
from deadpool.membership.embedded import EmbeddedEtcd, free_ports
from deadpool.membership.etcd import EtcdStore, parse_endpoints
from deadpool.membership.lease import LeaseKeeper
from deadpool.membership.records import MemberGone, MemberPut, StoreLost, StoreReached, ViewPut
from deadpool.membership.registry import Registry
from deadpool.membership.store import KeyPut, WatchConnected, WatchInterrupted
from tests.contract.membership.support import (
    TOKEN,
    TTL_S,
    EtcdProcess,
    Recorder,
    etcd_config,
    make_member,
    make_view,
    put_claim,
    wait_until,
)

MEMBERS = tuple(make_member(number) for number in range(2))


class Agent:
    """One member with its lease kept, as in a job."""

    def __init__(self, store: EtcdStore, number: int) -> None:
        self.registry = Registry(store, "job")
        put_claim(self.registry)
        self.member = make_member(number)
        self.lost = Recorder()
        self.keeper = LeaseKeeper(store, TTL_S, enrol=self._enrol, on_lost=self.lost)
        self.keeper.start()

    def _enrol(self, lease: object, again: bool) -> None:
        if again:
            self.registry.register_again(self.member, self.keeper.lease, TOKEN, holds_slot=True)
        else:
            self.registry.register(self.member, self.keeper.lease, TOKEN)

    def wait_until_registered_anew(self, seen: Recorder, after: int) -> None:
        seen.wait_for(MemberGone, lambda gone: gone.member_id == self.member.id, after=after)
        seen.wait_for(MemberPut, lambda put: put.member == self.member, after=after)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """What must be closed before the server is."""
    with ExitStack() as stack:
        yield stack


def open_store(opened: ExitStack, *endpoints: str) -> EtcdStore:
    return opened.enter_context(EtcdStore(etcd_config(*endpoints)))


def start_job(opened: ExitStack, *endpoints: str) -> list[Agent]:
    agents = [Agent(open_store(opened, *endpoints), number) for number in range(2)]
    for agent in agents:
        opened.callback(agent.keeper.close)
    first = agents[0]
    term = first.registry.campaign(first.member.id, first.keeper.lease)
    assert term is not None
    view = make_view(1, tuple(agent.member.id for agent in agents))
    assert first.registry.publish_view(view, 0, term) is not None
    return agents


def watch(agent: Agent) -> Recorder:
    seen = Recorder()
    agent.registry.watch(seen)
    seen.wait_for(StoreReached)
    return seen


def test_after_a_kill_and_restart_on_the_same_data_the_watch_goes_on_and_no_member_is_lost(
    own_etcd: EmbeddedEtcd, opened: ExitStack
) -> None:
    agents = start_job(opened, own_etcd.endpoint)
    seen = watch(agents[0])
    leases = [agent.keeper.lease for agent in agents]

    own_etcd.kill()
    seen.wait_for(StoreLost)
    n_before = len(seen.events)
    own_etcd.start()
    seen.wait_for(StoreReached, after=n_before)
    leader = agents[0].registry.leader()
    assert leader is not None
    _, revision = agents[0].registry.view()
    new_view = make_view(2, (MEMBERS[0].id, MEMBERS[1].id))
    assert agents[0].registry.publish_view(new_view, revision, leader[1]) is not None

    seen.wait_for(ViewPut, lambda put: put.view == new_view)
    assert [type(each) for each in seen.events[n_before:]] == [StoreReached, ViewPut]
    assert [agent.keeper.lease for agent in agents] == leases
    assert agents[0].registry.members() == MEMBERS


def test_a_frozen_server_is_noticed_by_idle_watches_and_members_enrol_again_when_it_is_back(
    own_etcd: EmbeddedEtcd, opened: ExitStack
) -> None:
    agents = start_job(opened, own_etcd.endpoint)
    idle = open_store(opened, own_etcd.endpoint)
    idle_seen = Recorder()
    idle.watch("/deadpool/nothing/", idle_seen)
    idle_seen.wait_for(WatchConnected)
    seen = watch(agents[0])
    # Just after traffic gRPC pings for reasons of its own; what must work is the ping of an idle connection.
    first_deadline_s = agents[0].keeper.deadline_s
    wait_until(lambda: agents[0].keeper.deadline_s > first_deadline_s + 1.5)

    os.kill(own_etcd.pid, signal.SIGSTOP)
    frozen_s = time.monotonic()
    idle_seen.wait_for(WatchInterrupted)
    assert time.monotonic() - frozen_s < 3.5
    wait_until(lambda: all(agent.keeper.is_overdue for agent in agents))
    assert not any(agent.keeper.reaches_store for agent in agents)
    with pytest.raises(StoreUnavailable):
        agents[0].registry.view()
    n_before = len(seen.events)
    os.kill(own_etcd.pid, signal.SIGCONT)

    for agent in agents:
        agent.wait_until_registered_anew(seen, n_before)
    assert sorted(agents[0].registry.members(), key=lambda member: member.id) == list(MEMBERS)
    wait_until(lambda: all(agent.keeper.reaches_store and not agent.keeper.is_overdue for agent in agents))
    assert [agent.lost.events for agent in agents] == [[], []]
    idle_seen.wait_for(WatchConnected, after=2)


def test_a_server_that_comes_back_with_older_data_is_listed_again(
    own_etcd: EmbeddedEtcd, opened: ExitStack
) -> None:
    store = open_store(opened, own_etcd.endpoint)
    for number in range(5):
        store.put(f"/deadpool/job/{number}", b"")
    seen = Recorder()
    store.watch("/deadpool/job/", seen)
    seen.wait_for(WatchConnected)

    own_etcd.kill()
    seen.wait_for(WatchInterrupted)
    n_before = len(seen.events)
    shutil.rmtree(own_etcd.log_file.with_name("etcd-data"))
    own_etcd.start()
    seen.wait_for(WatchConnected, after=n_before)
    store.put("/deadpool/job/new", b"")

    seen.wait_for(KeyPut, lambda put: put.pair.key == "/deadpool/job/new", after=n_before)


def test_with_one_of_three_servers_down_calls_watches_and_leases_go_on(
    tmp_path: Path, opened: ExitStack
) -> None:
    servers = EtcdProcess.start_cluster(tmp_path, 3)
    try:
        endpoints = tuple(server.endpoint for server in servers)
        agents = start_job(opened, *endpoints)
        seen = watch(agents[1])
        (victim,) = (server for server in servers if server.leads())

        # An election of etcd alone takes one to two seconds.
        patient = replace(etcd_config(*endpoints), call_timeout_s=10.0)
        registry = Registry(opened.enter_context(EtcdStore(patient)), "job")
        victim.kill()
        registry.put_recovery(7, {})
        leader = registry.leader()
        assert leader is not None
        _, revision = registry.view()
        new_view = make_view(2, (MEMBERS[0].id, MEMBERS[1].id))
        assert registry.publish_view(new_view, revision, leader[1]) is not None

        seen.wait_for(ViewPut, lambda put: put.view == new_view)
        assert [each for each in seen.events if isinstance(each, MemberGone)] == []
        with EtcdStore(etcd_config(victim.endpoint, *endpoints)) as late:
            assert Registry(late, "job").members() == MEMBERS
        opened.close()
    finally:
        for server in servers:
            server.close()


def test_an_unreachable_store_is_told_in_time_with_endpoint_and_remedy() -> None:
    (port,) = free_ports(1)
    store = EtcdStore(replace(etcd_config(f"127.0.0.1:{port}"), call_timeout_s=0.7))

    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable) as error:
        store.connect()

    assert time.monotonic() - began_s < 2.0
    assert f"127.0.0.1:{port}" in str(error.value)
    assert "Check that etcd runs" in str(error.value)
    store.close()


def test_a_port_that_accepts_and_says_nothing_is_told_in_time_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = etcd_config(f"127.0.0.1:{mute.getsockname()[1]}")
        store = EtcdStore(replace(config, call_timeout_s=0.7))
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.connect()
        assert time.monotonic() - began_s < 2.0
        store.close()


def test_nothing_is_written_to_stderr_by_a_client_that_cannot_reach_etcd() -> None:
    (port,) = free_ports(1)
    script = f"""
from deadpool.errors import StoreUnavailable
from deadpool.membership.etcd import EtcdConfig, EtcdStore
store = EtcdStore(EtcdConfig(endpoints=("127.0.0.1:{port}",), call_timeout_s=0.2))
try:
    store.connect()
except StoreUnavailable:
    print("unavailable")
store.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=30, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "unavailable\n", "")


def test_endpoints_are_read_with_default_port_and_all_problems_are_told() -> None:
    assert parse_endpoints("a, b:1234,[::1],http://c:1/,a:2379") == ("a:2379", "b:1234", "[::1]:2379", "c:1")

    with pytest.raises(ConfigError) as error:
        parse_endpoints("a,,b:x,:5,[::1,c:70000,d:1")

    assert len(error.value.problems) == 5
