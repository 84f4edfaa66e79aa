"""No spare is left: another node comes if the job may grow, else the state is saved and the job ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.store.checkpoint import latest_complete
from tests.slurm.conftest import StartCluster
from tests.slurm.test_node_loss import ARGS, STRIKE_AT

pytestmark = pytest.mark.full


def test_a_job_that_may_grow_takes_another_node_for_the_one_it_lost(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    job = rig.submit(cluster, tmp_path, ARGS, spares=0, options=("--grow",))
    job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
    assert cluster.call("squeue", "--noheader", "--format=%N").strip() == "n[1-3]"
    cluster.kill_node("n2")
    joined = job.wait_for("recovery.done")
    assert [job.node_of(rank) for rank in range(3)].count("n4") == 1, joined
    shown = job.check_gone_soon_after("finished")
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), job.output
    rig.check_identical(job, ARGS)


def test_a_job_goes_on_when_all_its_first_nodes_are_replaced_by_nodes_that_joined_later(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:  # the job's own would end with the first nodes
        setup = f"export DEADPOOL_ETCD={etcd.endpoint}"
        args = ("--steps", "100", *ARGS[2:])
        job = rig.submit(cluster, tmp_path, args, active=2, spares=0, options=("--grow",), setup=setup)
        job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
        for first in ("n1", "n2"):
            known = [event["generation"] for event in job.named("recovery.done")]
            cluster.call("scancel", "--signal=KILL", cluster.step_on(first))
            job.wait_for("recovery.done", generation=lambda generation, known=known: generation not in known)
        assert {job.node_of(rank) for rank in range(2)} == {"n3", "n4"}
        shown = job.check_gone_soon_after("finished")
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), job.output
    rig.check_identical(job, args, active=2)


def test_a_job_that_may_not_grow_saves_its_state_and_ends_with_code_3(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(3)
    job = rig.submit(cluster, tmp_path, ARGS, active=2, spares=0, options=("--spare-wait-s", "3"))
    job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
    cluster.kill_node("n2")
    shown = job.check_gone_soon_after("halted")
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "3:0"), job.output
    manifest = latest_complete(job.run_dir.parent / "checkpoints")
    assert manifest is not None, job.output
    assert manifest.name.step >= STRIKE_AT
