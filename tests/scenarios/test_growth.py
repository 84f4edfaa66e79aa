"""Scenario A17 of the catalogue: what a survivor holds, and what etcd holds, does not grow."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.jobs import find_job
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.testing.faults import descendants

Launch = Callable[..., Any]

RECOVERIES = 20
SLACK = 5
RSS_SLACK = 1.05
SETTLE_S = 10.0  # old communicators are released off the critical path, in up to a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a process holds."""

    threads: int
    descriptors: int
    memory_files: int
    children: int
    etcd_connections: int
    rss_kb: int

    def exceeds(self, other: Holdings) -> list[str]:
        """What is more than the catalogue allows, compared with an earlier moment."""
        limits = {
            "threads": other.threads + SLACK,
            "descriptors": other.descriptors + SLACK,
            "memory_files": other.memory_files,
            "children": other.children,
            "etcd_connections": other.etcd_connections,
            "rss_kb": other.rss_kb * RSS_SLACK,
        }
        return [
            f"{name}: {getattr(self, name)}, more than {limit:g}"
            for name, limit in limits.items()
            if getattr(self, name) > limit
        ]


def holdings(pid: int, etcd: str) -> Holdings:
    targets = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(entry.path))
        except FileNotFoundError:
            continue  # closed meanwhile
    return Holdings(
        threads=len(os.listdir(f"/proc/{pid}/task")),
        descriptors=len(targets),
        memory_files=sum(target.startswith("/memfd:") for target in targets),
        children=len(descendants(pid)),
        etcd_connections=len(connections_to(etcd) & set(targets)),
        rss_kb=next(
            int(line.split()[1])
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("VmRSS:")
        ),
    )


def connections_to(endpoint: str) -> set[str]:
    """Sockets of this machine that are connected to a port, as /proc/<pid>/fd names them."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    tables = (Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return {f"socket:[{line[9]}]" for line in lines if line[2].endswith(port) and line[3] == "01"}


def strike(job: Any, number: int) -> None:
    """Lose rank 1: its whole host, and every third time its worker alone."""
    os.kill(job.worker_of(1) if number % 3 == 0 else job.agent_of(1), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_twenty_recoveries_leave_the_survivor_and_etcd_as_two_did(launch: Launch) -> None:
    spares, job_id = 2, "growth"
    job = launch(
        ("--parallel", "fsdp2", "--steps", "1000000"),
        nnodes=2,
        spares=spares,
        options=("--respawn", "--job-id", job_id),
        limit_s=380.0,
    )
    job.wait_for(lambda event: event["event"] == "snapshot.committed" and event["step"] >= 3, "commit")
    (endpoint,) = find_job(job_id).etcd
    processes = {"worker": job.worker_of(0), "agent": job.agent_of(0)}
    base: dict[str, Holdings] = {}
    for number in range(1, RECOVERIES + 1):
        strike(job, number)
        job.wait_until(lambda n=number: len(job.named("recovery.done")) == n, f"recovery {number}")
        done = job.named("recovery.done")[-1]
        job.wait_until(
            lambda n=number, g=done["generation"]: (
                len(job.named("member.registered")) - n > 2
                and any(event["generation"] == g for event in job.named("snapshot.committed"))
            ),
            "protection and a spare for the next recovery",
        )
        if number == 2:
            base = {name: holdings(pid, endpoint) for name, pid in processes.items()}
    assert base["agent"].etcd_connections > 0
    assert job.worker_of(0) == processes["worker"]
    assert job.agent_of(0) == processes["agent"]
    job.wait_until(lambda: len(job.named("member.registered")) == 2 + spares + RECOVERIES, "all spares")
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        grown = {name: holdings(pid, endpoint).exceeds(base[name]) for name, pid in processes.items()}
        if not any(grown.values()) or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    assert not any(grown.values()), f"{grown}; after two recoveries: {base}"
    check_keys(endpoint, newest=RECOVERIES + 1)


def check_keys(endpoint: str, newest: int) -> None:
    """No key of a generation older than the one before the newest; no lost host is a member."""
    with EtcdStore(EtcdConfig(endpoints=(endpoint,))) as store:
        pairs, _ = store.get_prefix("/deadpool/")
    parts = [pair.key.split("/")[3:] for pair in pairs]
    generations = Counter(int(part) for names in parts for part in names if part.isdigit())
    assert max(generations) == newest
    assert min(generations) >= newest - 1, f"keys by generation: {sorted(generations.items())}"
    assert sum(names[0] == "members" for names in parts) == 4


@pytest.mark.full
def test_a_thousand_undisturbed_steps_are_nothing_to_etcd(launch: Launch) -> None:
    job_id = "steady"
    job = launch(("--steps", "100000", "--step-s", "0.001"), nnodes=2, spares=1, options=("--job-id", job_id))
    job.wait_for(lambda event: event["event"] == "worker.rehearsed", "rehearsal of the spare")

    def committed_after(step: int) -> int:
        committed = job.wait_for(
            lambda event: event["event"] == "snapshot.committed" and event["step"] > step, f"step {step}"
        )
        return int(committed["step"])

    (endpoint,) = find_job(job_id).etcd
    with EtcdStore(EtcdConfig(endpoints=(endpoint,))) as store:
        first_step = job.named("snapshot.committed")[-1]["step"]
        _, first = store.get_prefix("/deadpool/")
        last_step = committed_after(first_step + 1000)
        _, last = store.get_prefix("/deadpool/")
    assert last - first < 50, f"{last - first} revisions in {last_step - first_step} steps"
