"""Scenario A16 of the catalogue: what an older generation, or an older run, has left behind is harmless."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deadpool.core.types import Member
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.membership.registry import Registry
from deadpool.testing.faults import descendants

ByHand = Callable[..., Any]

ARGS = ("--steps", "40")


def start(by_hand: ByHand, etcd: EmbeddedEtcd, spares: int) -> Any:
    job = by_hand((etcd.endpoint,), ARGS, nnodes=2, spares=spares)
    for _ in range(2 + spares):
        job.start_host()
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 3, "commit")
    return job


def keys(etcd: EmbeddedEtcd) -> list[str]:
    with EtcdStore(EtcdConfig(endpoints=(etcd.endpoint,))) as store:
        pairs, _ = store.get_prefix("/deadpool/")
    return [pair.key for pair in pairs]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_job_starts_under_the_id_of_one_that_was_killed(
    rig: Any, by_hand: ByHand, etcd: EmbeddedEtcd
) -> None:
    killed = start(by_hand, etcd, spares=0)
    for host in killed.hosts:
        for pid in [*descendants(host.pid), host.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert set(killed.wait().values()) == {-signal.SIGKILL}
    old = {key for key in keys(etcd) if "/members/" in key}
    assert len(old) == 2
    again = start(by_hand, etcd, spares=0)
    assert not old & set(keys(etcd))
    assert set(again.wait().values()) == {0}, again.output[-4000:]
    assert not keys(etcd)
    assert {record["g"] for record in again.records(0)} == {1}
    rig.check_trace(again, ARGS, world_size=2)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_strangers_on_the_ports_of_a_lost_host_do_no_harm(
    rig: Any, by_hand: ByHand, etcd: EmbeddedEtcd
) -> None:
    """The lost one hosted the rendezvous of the generation; whoever connects there now hears nothing."""
    job = start(by_hand, etcd, spares=1)
    rendezvous = rendezvous_of(etcd)
    victim = next(host for host in job.hosts if port_is_of(host.pid, rendezvous.rendezvous_port))
    struck = next(rank for rank in range(2) if job.agent_of(rank) == victim.pid)
    victim.kill()
    victim.wait()
    ports = (rendezvous.control_port, rendezvous.data_port, rendezvous.rendezvous_port)
    with squatting(*ports):
        job.wait_for(lambda event: event["event"] == "recovery.done", "recovery")
        codes = job.wait()
    assert codes.pop(victim.pid) == -signal.SIGKILL
    assert set(codes.values()) == {0}, job.output[-4000:]
    rig.check_trace(job, ARGS, world_size=2)
    rig.check_survivors(job, replaced={struck}, world_size=2)


def rendezvous_of(etcd: EmbeddedEtcd) -> Member:
    """The member that hosts the rendezvous of the current generation."""
    with EtcdStore(EtcdConfig(endpoints=(etcd.endpoint,))) as store:
        registry = Registry(store, "by-hand")
        view, _ = registry.view()
        assert view is not None
        return next(member for member in registry.members() if member.id == view.rendezvous)


def port_is_of(pid: int, port: int) -> bool:
    """Whether a process listens on a port."""
    with open("/proc/net/tcp", encoding="ascii") as table:
        lines = [line.split() for line in table.readlines()[1:]]
    listening = {
        f"socket:[{line[9]}]" for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"
    }
    targets = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return bool(listening & targets)


@contextlib.contextmanager
def squatting(*ports: int) -> Iterator[None]:
    """Listen on these ports and say nothing; the kernel accepts for us."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield
