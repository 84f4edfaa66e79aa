"""Hosts started one by one against an etcd of one's own, as on several machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.testing.cluster import HostsJob
from tests.contract.membership.support import EtcdProcess, add_users, tls_options

TLS = Path(__file__).resolve().parents[1] / "contract" / "membership" / "tls"
TOKEN_TTL_S = 4
ACCESS = {
    "CA": str(TLS / "ca.crt"),
    "CERT": str(TLS / "client.crt"),
    "KEY": str(TLS / "client.key"),
    "USER": "trainer",
    "PASSWORD": "secret",
}

ByHand = Callable[..., HostsJob]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[EtcdProcess]]:
    servers = EtcdProcess.start_cluster(tmp_path, 3)
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdProcess]:
    """TLS with client certificates, passwords, and tokens that end whether they are used or not."""
    secret = tmp_path / "token-secret"
    secret.write_text("for the signatures of tokens")
    server = EtcdProcess.start_one(
        tmp_path,
        *tls_options(TLS),
        *("--auth-token", f"jwt,priv-key={secret},sign-method=HS256,ttl={TOKEN_TTL_S}s"),
        config=EtcdConfig(
            endpoints=(), ca_file=TLS / "ca.crt", cert_file=TLS / "client.crt", key_file=TLS / "client.key"
        ),
    )
    try:
        add_users(server)
        yield server
    finally:
        server.close()


def keys_left(config: EtcdConfig) -> list[str]:
    with EtcdStore(config) as store:
        return [pair.key for pair in store.get_prefix("/deadpool/")[0]]


def wait_for_step(job: HostsJob, step: int) -> Any:
    return job.wait_for(
        lambda event: event["event"] == "snapshot.committed" and event["step"] >= step,
        f"commit of step {step}",
    )


def kill_host_of(job: HostsJob, rank: int) -> int:
    """Kill the agent of a rank, and wait for the recovery; returns its process id."""
    victim = next(host for host in job.hosts if host.pid == job.agent_of(rank))
    victim.kill()
    job.wait_for(lambda event: event["event"] == "recovery.done", "recovery")
    return victim.pid


def ask_status(*arguments: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "deadpool", "status", *arguments, "--json"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def check_codes(job: HostsJob, victim: int) -> None:
    codes = job.wait()
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {0}, job.output[-4000:]


@pytest.mark.full
def test_a_killed_host_is_replaced_and_nothing_is_left_in_etcd(etcd: EmbeddedEtcd, by_hand: ByHand) -> None:
    job = by_hand([etcd.endpoint], ("--steps", "40"), nnodes=2)
    for _ in range(3):
        job.start_host()
    wait_for_step(job, 0)
    check_codes(job, kill_host_of(job, 1))
    assert keys_left(EtcdConfig(endpoints=(etcd.endpoint,))) == []


@pytest.mark.full
def test_a_second_job_under_a_live_id_is_refused(etcd: EmbeddedEtcd, by_hand: ByHand) -> None:
    job = by_hand([etcd.endpoint], ("--steps", "200"), nnodes=2)
    for _ in range(3):
        job.start_host()
    wait_for_step(job, 0)
    refused = job.start_host()
    assert refused.wait(job.limit_s) == 2
    text = job.output_of(refused)
    assert "belongs to a live job" in text
    assert "--job-id" in text


@pytest.mark.full
def test_a_host_is_replaced_although_one_etcd_member_was_down_and_another_dies(
    rig: Any, cluster: list[EtcdProcess], by_hand: ByHand
) -> None:
    first = cluster[0]
    first.kill()  # every host asks it first
    args = ("--steps", "120")
    job = by_hand([server.endpoint for server in cluster], args, nnodes=3)
    for _ in range(4):
        job.start_host()
    wait_for_step(job, 5)

    first.start()
    first.wait_until_up()
    leader = next(server for server in cluster if server.leads())
    leader.kill()
    victim = kill_host_of(job, 1)

    check_codes(job, victim)
    assert job.named("recovery.done")[0]["source"] in ("replica", "replicated")
    rig.check_trace(job, args, 3)
    rig.check_one_owner(job, 3)
    rig.check_survivors(job, {1}, 3)
    reachable = next(server for server in cluster if server is not leader)
    assert keys_left(reachable.config) == []


@pytest.mark.full
def test_a_job_over_tls_with_a_password_outlives_its_tokens(
    rig: Any, guarded: EtcdProcess, tmp_path: Path, by_hand: ByHand
) -> None:
    settings = tmp_path / "job.toml"
    settings.write_text(
        "[membership]\n"
        f'ca = "{TLS / "ca.crt"}"\ncert = "{TLS / "client.crt"}"\nkey = "{TLS / "client.key"}"\n'
        'user = "trainer"\n'
    )
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    args = ("--steps", "200")
    job = by_hand([guarded.endpoint], args, nnodes=2, options=("--config", str(settings)))
    for _ in range(3):
        job.start_host(environment=runtime | {"DEADPOOL_MEMBERSHIP_PASSWORD": "secret"})
    formed_s = float(wait_for_step(job, 0)["monotonic_s"])
    status = ask_status("by-hand", environment=runtime)
    assert [host["state"] for host in status["hosts"]].count("active") == 2
    trusted = {f"DEADPOOL_MEMBERSHIP_{name}": value for name, value in ACCESS.items()}
    asked = ask_status("by-hand", "--etcd", guarded.endpoint, environment=runtime | trusted)
    assert asked["phase"] == "running"
    job.wait_for(
        lambda event: (
            event["event"] == "snapshot.committed"
            and float(event["monotonic_s"]) > formed_s + 2 * TOKEN_TTL_S
        ),
        "commit after the first tokens ended",
    )
    (job_file,) = (tmp_path / "deadpool").iterdir()
    writer = json.loads(job_file.read_text())["pid"]
    check_codes(job, kill_host_of(job, next(rank for rank in (0, 1) if job.agent_of(rank) != writer)))
    assert not job_file.exists()
    assert not job.named("store.unreachable"), "a token that ended is no outage"
    rig.check_trace(job, args, 2)
    assert "secret" not in job.output
