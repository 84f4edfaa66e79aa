"""A job that simply runs, on nodes under two switches: what is seen of it, and that a person can end it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deadpool.cli.slurm.job import read_job
from deadpool.membership.etcd import EtcdStore
from deadpool.membership.registry import Registry
from deadpool.runtime.endpoints import etcd_config
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.conftest import Submitted
from tests.slurm.test_node_loss import ARGS

pytestmark = pytest.mark.full

TOPOLOGY = """\
SwitchName=left Nodes=n1,n2
SwitchName=right Nodes=n3,n4
SwitchName=core Switches=left,right
"""
DOCTOR_S = 10.0


@pytest.fixture(scope="module")
def job(
    rig: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Submitted]:
    if reason := why_not():
        pytest.skip(f"{request.node.name}: {reason}")
    folder = tmp_path_factory.mktemp("allocation")
    with Cluster(folder / "slurm", 4, topology=TOPOLOGY) as cluster:
        job = rig.submit(cluster, folder, ("--steps", "100000", *ARGS[2:]))
        job.wait_for("snapshot.committed")
        job.wait_until_registered(4)
        yield job


def doctor(job: Submitted, *arguments: str) -> tuple[int, str, float]:
    began_s = time.monotonic()
    done = deadpool(job, "doctor", "--slurm", *arguments)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began_s


def deadpool(job: Submitted, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["deadpool", *arguments],
        env=job.cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_etcd_has_three_members_on_three_nodes_and_asks_for_certificates(job: Submitted) -> None:
    members = read_job(job.run_dir).etcd
    assert len({member.node for member in members}) == 3
    assert (job.run_dir / "tls" / "job.key").stat().st_mode & 0o777 == 0o600
    assert not (job.run_dir / "tls" / "ca.key").exists()
    for member in members:
        assert b"certificate" in speak_without_certificate(member.endpoint)


def speak_without_certificate(endpoint: str) -> bytes:
    """What openssl says when it connects without a certificate of its own."""
    done = subprocess.run(
        ["openssl", "s_client", "-connect", endpoint],
        input=b"GET / HTTP/1.0\n\n",
        capture_output=True,
        timeout=20,
    )
    return done.stderr


def test_copies_lie_under_another_switch(job: Submitted) -> None:
    config = read_job(job.run_dir).decode_config()
    with EtcdStore(etcd_config(config.membership)) as store:
        registry = Registry(store, config.job.job_id)
        view, _ = registry.view()
        domains = {member.id: member.domain for member in registry.members()}
    assert set(domains.values()) == {"core.left", "core.right"}
    assert view is not None
    for slot, holders in enumerate(view.holders):
        mine = domains[view.slots[slot]]
        assert holders
        others = [domains[view.slots[holder]] for holder in holders]
        assert mine not in others, (slot, holders)


def test_the_doctor_finds_a_job_from_the_template_in_order(job: Submitted) -> None:
    code, text, seconds = doctor(job, "--job", job.slurm_id, str(job.run_dir))
    assert seconds < DOCTOR_S
    for line in ("no-kill", "signal", "requeue", "time", "spares: 1 of 1 left", "ports: 12 ports"):
        assert f"ok      {line}" in text
    # The embedded etcd is an unsafe version, and this machine's name may resolve to loopback.
    changes = [line.split()[1] for line in text.splitlines() if line.startswith("change")]
    assert set(changes) <= {"etcd:", "interface:"}, text
    assert code == (2 if changes else 0)


def test_status_shows_the_job_of_a_run_folder(job: Submitted) -> None:
    done = deadpool(job, "status", "--json", str(job.run_dir))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["phase"], len(shown["hosts"])) == ("running", 4)


def test_a_job_that_a_person_cancels_is_not_submitted_again(job: Submitted) -> None:
    job.cluster.call("scancel", job.slurm_id)
    shown = job.wait_until_gone()
    assert shown["JobState"] == "CANCELLED", job.output
    assert "was cancelled, so it is not submitted again" in job.output
    assert not (job.run_dir / "resubmitted").exists()
    assert job.cluster.call("squeue", "--noheader").strip() == ""
