"""Scenarios A07 and A08 of the catalogue: etcd loses its leader, stands still, or is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool.errors import StoreUnavailable
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.membership.registry import Registry
from deadpool.store.checkpoint import latest_complete
from tests.contract.membership.support import EtcdProcess

ByHand = Callable[..., Any]

HOSTS = 3
TTL_S = 3.0
AWAY_S = 4 * TTL_S
STATUS_S = 3.0
IMPORTS_S = 3.0  # of a Python process, on busy cores
UNREACHABLE_CODE = 5
POLL_S = 0.1


@pytest.fixture
def etcd_cluster(tmp_path: Path) -> Iterator[list[EtcdProcess]]:
    servers = EtcdProcess.start_cluster(tmp_path, 3)
    yield servers
    for server in servers:
        server.close()


def members(endpoints: tuple[str, ...]) -> set[str]:
    with EtcdStore(EtcdConfig(endpoints=endpoints)) as store:
        return {member.id for member in Registry(store, "by-hand").members()}


def start(by_hand: ByHand, endpoints: tuple[str, ...], args: tuple[str, ...]) -> Any:
    job = by_hand(endpoints, args, nnodes=HOSTS, spares=0, limit_s=160.0)
    for _ in range(HOSTS):
        job.start_host()
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    return job


def steps_of(job: Any) -> int:
    return max(int(record["s"]) for record in job.records(0))


def check_undisturbed(rig: Any, job: Any, args: tuple[str, ...]) -> None:
    assert set(job.wait().values()) == {0}, job.output[-4000:]
    assert not job.named("recovery.begin")
    assert {record["g"] for rank in range(HOSTS) for record in job.records(rank)} == {1}
    assert not job.named("member.fenced")
    rig.check_trace(job, args, world_size=HOSTS)
    rig.check_survivors(job, replaced=set(), world_size=HOSTS)


@pytest.mark.full
def test_a_lost_etcd_leader_costs_no_recovery(
    rig: Any, by_hand: ByHand, etcd_cluster: list[EtcdProcess]
) -> None:
    args = ("--steps", "250")
    endpoints = tuple(server.endpoint for server in etcd_cluster)
    job = start(by_hand, endpoints, args)
    before = members(endpoints)
    leader = next(server for server in etcd_cluster if server.leads())
    leader.kill()
    at_kill = steps_of(job)
    job.wait_until(lambda: steps_of(job) >= at_kill + 30, "30 steps without that server")
    leader.start()
    job.wait_until(lambda: steps_of(job) >= at_kill + 60, "30 steps with it")
    assert members(endpoints) == before
    assert len(before) == HOSTS
    check_undisturbed(rig, job, args)


@pytest.mark.full
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_training_goes_on_while_etcd_is_away_and_all_are_members_again_afterwards(
    rig: Any, by_hand: ByHand, etcd: EmbeddedEtcd, how: str
) -> None:
    args = ("--steps", "700", "--step-s", "0.03")
    job = start(by_hand, (etcd.endpoint,), args)
    before = members((etcd.endpoint,))
    if how == "stopped":
        os.kill(etcd.pid, signal.SIGSTOP)
    else:
        etcd.kill()
    back_s = time.monotonic() + AWAY_S
    at_loss = steps_of(job)
    job.wait_for(lambda event: event["event"] == "store.unreachable", "notice of the outage")
    began_s = time.monotonic()
    status = subprocess.run(
        [sys.executable, "-m", "deadpool", "status", "by-hand"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
    )
    status_s = time.monotonic() - began_s
    time.sleep(max(0.0, back_s - time.monotonic()))
    steps_while_away = steps_of(job) - at_loss
    if how == "stopped":
        os.kill(etcd.pid, signal.SIGCONT)
    else:
        etcd.start()
    returned_s = time.monotonic()
    while members_if_reachable(etcd) != before:
        assert time.monotonic() - returned_s < 2 * TTL_S, "not all are members again"
        time.sleep(POLL_S)
    assert steps_while_away > 20
    assert status.returncode == UNREACHABLE_CODE
    assert "unreachable" in status.stdout
    assert f"hosts: {HOSTS} active" in status.stdout  # their agents say so themselves
    assert status_s < STATUS_S + IMPORTS_S
    check_undisturbed(rig, job, args)


@pytest.mark.full
@pytest.mark.parametrize("is_leader", [True, False], ids=["the leader", "another host"])
def test_a_host_that_is_lost_while_etcd_stands_still_is_replaced_once_it_is_back_and_no_other_is(
    rig: Any, by_hand: ByHand, etcd: EmbeddedEtcd, is_leader: bool
) -> None:
    """All leases have run out by then: etcd ends them at once, and the hosts that live register again."""
    args = ("--steps", "200")
    job = by_hand((etcd.endpoint,), args, nnodes=HOSTS, limit_s=160.0)
    job.start_host()
    job.wait_for(lambda event: event["event"] == "leader.elected", "a leader, which gets a slot")
    for _ in range(HOSTS):
        job.start_host()
    job.wait_until(lambda: len(job.named("member.registered")) == HOSTS + 1, "all hosts")
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    (leader,) = {event["member"] for event in job.named("leader.elected")}
    ranks = {line["member"]: line["rank"] for line in job.workers()}
    struck = next(rank for member, rank in ranks.items() if (member == leader) == is_leader)
    victim = next(host for host in job.hosts if host.pid == job.agent_of(struck))
    os.kill(etcd.pid, signal.SIGSTOP)
    victim.kill()
    try:
        time.sleep(AWAY_S)  # the outage
    finally:
        os.kill(etcd.pid, signal.SIGCONT)
    done = job.wait_for(lambda event: event["event"] == "recovery.done", "recovery")
    codes = job.wait()
    assert codes.pop(victim.pid) == -signal.SIGKILL
    assert set(codes.values()) == {0}, job.output[-4000:]
    assert len(done["replaced"]) == 1
    assert not job.named("member.fenced")
    rig.check_trace(job, args, world_size=HOSTS)
    rig.check_survivors(job, replaced={struck}, world_size=HOSTS)


@pytest.mark.full
def test_sigterm_saves_the_newest_step_although_etcd_is_away_and_every_lease_has_run_out(
    by_hand: ByHand, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    job = by_hand(
        (etcd.endpoint,),
        ("--steps", "2000", "--step-s", "0.03"),
        nnodes=HOSTS,
        spares=0,
        limit_s=160.0,
        options=("--checkpoint-dir", str(folder)),
    )
    for _ in range(HOSTS):
        job.start_host()
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 5, "commit")
    etcd.kill()
    time.sleep(AWAY_S)  # the outage
    newest = max(event["step"] for event in job.named("snapshot.committed"))
    for host in job.hosts:
        host.send_signal(signal.SIGTERM)
    assert set(job.wait().values()) == {143}, job.output[-4000:]
    saved = latest_complete(folder)
    assert saved is not None, job.output[-4000:]
    assert saved.name.step >= newest


def members_if_reachable(etcd: EmbeddedEtcd) -> set[str]:
    try:
        return members((etcd.endpoint,))
    except StoreUnavailable:
        return set()
