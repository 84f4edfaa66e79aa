"""Hosts started one by one against an etcd of one's own, as on several machines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdConfig, EtcdStore

TOY = Path(__file__).parent / "toy.py"
LIMIT_S = 100.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd(tmp_path / "etcd") as server:
        yield server


class Hosts:
    """`deadpool run --etcd` processes of one job."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *script_args: str, job_id: str = "by-hand") -> subprocess.Popen[bytes]:
        number = len(self.processes)
        with open(self.folder / f"host-{number}.txt", "wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "deadpool", "run", "--etcd", self.endpoint),
                    *("--job-id", job_id, "--nnodes", "2", "--spares", "1", "--lease-ttl-s", "3"),
                    *("--run-dir", str(self.folder / "run"), str(TOY), *script_args),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def wait_for_event(self, name: str) -> dict[str, object]:
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            for path in (self.folder / "run").glob("events-*.jsonl"):
                for line in path.read_text().splitlines():
                    if line.endswith("}") and json.loads(line)["event"] == name:
                        return dict(json.loads(line))
            time.sleep(0.02)
        raise TimeoutError(f"no {name} within {LIMIT_S:g} s:\n{self.output()}")

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("host-*.txt")))

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def hosts(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Hosts]:
    started = Hosts(etcd.endpoint, tmp_path)
    yield started
    started.close()


@pytest.mark.full
@pytest.mark.timeout(150)
def test_a_killed_host_is_replaced_and_nothing_is_left_in_etcd(hosts: Hosts, etcd: EmbeddedEtcd) -> None:
    for _ in range(3):
        hosts.start("--steps", "40")
    hosts.wait_for_event("snapshot.committed")
    lines = (hosts.folder / "run/workers.jsonl").read_text().splitlines()
    workers = [json.loads(line) for line in lines]
    agents = {process.pid: process for process in hosts.processes}
    victim = next(_parent(worker["pid"]) for worker in workers if worker["rank"] == 1)
    assert victim in agents
    os.kill(victim, signal.SIGKILL)
    hosts.wait_for_event("recovery.done")
    codes = {pid: process.wait(LIMIT_S) for pid, process in agents.items()}
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {0}, hosts.output()[-4000:]
    with EtcdStore(EtcdConfig(endpoints=(etcd.endpoint,))) as store:
        left, _ = store.get_prefix("/deadpool/")
    assert not left, [pair.key for pair in left]


@pytest.mark.full
@pytest.mark.timeout(150)
def test_a_second_job_under_a_live_id_is_refused(hosts: Hosts) -> None:
    for _ in range(3):
        hosts.start("--steps", "200")
    hosts.wait_for_event("snapshot.committed")
    refused = hosts.start("--steps", "200")
    assert refused.wait(LIMIT_S) == 2
    text = (hosts.folder / "host-3.txt").read_text()
    assert "belongs to a live job" in text
    assert "--job-id" in text


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
