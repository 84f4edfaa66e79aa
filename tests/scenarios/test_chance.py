"""A fault of a host and one of etcd at moments left to chance: the job ends as if neither had been.

What goes wrong when two things happen at once is seldom what somebody thought of. A seed gives the same
faults and delays again; what they meet in the job is as the machine has it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.testing.cluster import HostsJob
from deadpool.testing.faults import descendants

ByHand = Callable[..., HostsJob]

HOSTS = 3
ARGS = ("--steps", "200")
BEFORE_S = 3.0  # the host's fault comes so long before that of etcd, or so long after its end, at most
AFTER_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What happens, with seconds from the first of both faults on."""

    host_fault: str  # kill, stop, worker (killed), pause, or pause agent
    pause_s: float
    etcd_fault: str  # stop, kill, or none
    outage_s: float
    host_after_s: float  # after etcd's; negative: before
    is_leader: bool  # the host that leads, or another

    @staticmethod
    def of(seed: int) -> Plan:
        chance = random.Random(seed)
        outage_s = chance.choice([0.5, 2.0, 4.0, 7.0, 12.0])
        return Plan(
            host_fault=chance.choice(["kill", "kill", "stop", "worker", "pause", "pause agent"]),
            pause_s=chance.choice([0.5, 1.5, 2.5, 3.5, 6.0]),
            etcd_fault=chance.choice(["stop", "kill", "none"]),
            outage_s=outage_s,
            host_after_s=chance.uniform(-BEFORE_S, outage_s + AFTER_S),
            is_leader=chance.random() < 0.5,
        )


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def strike_host(plan: Plan, agent: int, worker: int) -> None:
    match plan.host_fault:
        case "kill":
            send(signal.SIGKILL, [agent])
        case "stop":
            send(signal.SIGSTOP, [agent, *descendants(agent)])
        case "worker":
            send(signal.SIGKILL, [worker])
        case _:
            struck = [agent] if plan.host_fault == "pause agent" else [agent, *descendants(agent)]
            send(signal.SIGSTOP, struck)
            time.sleep(plan.pause_s)  # the fault
            send(signal.SIGCONT, struck)


def strike_etcd(plan: Plan, etcd: EmbeddedEtcd) -> None:
    if plan.etcd_fault == "stop":
        os.kill(etcd.pid, signal.SIGSTOP)
        time.sleep(plan.outage_s)  # the fault
        os.kill(etcd.pid, signal.SIGCONT)
    elif plan.etcd_fault == "kill":
        etcd.kill()
        time.sleep(plan.outage_s)  # the fault
        etcd.start()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 108))
def test_a_fault_of_a_host_and_one_of_etcd_cost_one_host_at_most_and_no_bit(
    rig: Any, by_hand: ByHand, etcd: EmbeddedEtcd, seed: int
) -> None:
    plan = Plan.of(seed)
    print(plan)
    job = by_hand((etcd.endpoint,), ARGS, nnodes=HOSTS, spares=2, limit_s=160.0)
    job.start_host()
    job.wait_for(lambda event: event["event"] == "leader.elected", "a leader, which gets a slot")
    for _ in range(HOSTS + 1):
        job.start_host()
    job.wait_until(lambda: len(job.named("member.registered")) == HOSTS + 2, "all hosts")
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 3, "commit")
    leader = job.named("leader.elected")[0]["member"]
    ranks = {line["member"]: line["rank"] for line in job.workers()}
    rank = next(rank for member, rank in ranks.items() if (member == leader) == plan.is_leader)
    agent = job.agent_of(rank)

    faults = [
        threading.Timer(max(0.0, plan.host_after_s), strike_host, (plan, agent, job.worker_of(rank))),
        threading.Timer(max(0.0, -plan.host_after_s), strike_etcd, (plan, etcd)),
    ]
    for fault in faults:
        fault.start()
    for fault in faults:
        fault.join()
    others = [host for host in job.hosts if host.pid != agent]
    job.wait_until(lambda: all(host.poll() is not None for host in others), "end of the other hosts")
    send(signal.SIGKILL, [agent] if plan.host_fault == "stop" else [])

    assert {host.returncode for host in others} == {0}, job.output[-4000:]
    assert job.wait()[agent] in {"kill": (-9,), "stop": (-9,), "worker": (0,)}.get(plan.host_fault, (0, 73))
    replaced = [member for done in job.named("recovery.done") for member in done["replaced"]]
    assert len(replaced) <= 1
    assert {event["member"] for event in job.named("member.fenced")} <= set(replaced)
    rig.check_trace(job, ARGS, world_size=HOSTS)
