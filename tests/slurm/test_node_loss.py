"""A node dies under a running job: any node, and the one that runs the batch script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deadpool.store.checkpoint import latest_complete
from tests.slurm.conftest import StartCluster

ARGS = ("--steps", "200", "--step-s", "0.1")
STRIKE_AT = 20
OLD_AT = 80  # steps: at least 8 s


def test_a_lost_node_is_replaced_by_a_spare_and_the_job_completes(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    job = rig.submit(cluster, tmp_path, ARGS)
    job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
    victim = next(job.node_of(rank) for rank in range(3) if job.node_of(rank) != "n1")
    cluster.kill_node(victim)
    job.wait_for("recovery.done")
    shown = job.check_gone_soon_after("finished")
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), job.output
    rig.check_identical(job, ARGS)


def test_the_job_outlives_its_batch_host_and_leaves_the_queue(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    job = rig.submit(cluster, tmp_path, ARGS)
    job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
    assert cluster.show(job.slurm_id)["BatchHost"] == "n1"
    cluster.kill_node("n1")
    shown = job.check_gone_soon_after("finished")
    assert shown["JobState"] == "CANCELLED", job.output
    assert job.result()["phase"] == "finished"
    rig.check_identical(job, ARGS)


@pytest.mark.full
def test_a_job_that_slurm_ends_because_its_batch_host_came_back_has_saved_its_newest_step(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    # It is back before Slurm gives it up, which would take it out of the job. A job that has run for longer
    # than BatchStartTimeout and MessageTimeout, 6 s, then ends at once, for lack of its script.
    cluster = start_cluster(4, timeout_s=30, extra="BatchStartTimeout=1")
    job = rig.submit(cluster, tmp_path, ("--steps", "100000", *ARGS[2:]))
    job.wait_for("snapshot.committed", step=lambda step: step >= OLD_AT)
    is_active = "n1" in {job.node_of(rank) for rank in range(3)}
    cluster.kill_node("n1")
    job.wait_for("liveness.gone", subject=lambda member: member.startswith("n1-"))
    if is_active:  # the job has recovered long before a machine is back
        recovery = job.wait_for("recovery.done")
        job.wait_for("snapshot.committed", generation=recovery["generation"])
    newest = max(event["step"] for event in job.named("snapshot.committed"))
    cluster.start_node("n1")
    shown = job.wait_until_gone()
    assert (shown["JobState"], shown["ExitCode"]) == ("NODE_FAIL", "0:1"), job.output
    saved = latest_complete(job.run_dir.parent / "checkpoints")
    assert saved is not None, job.output
    assert saved.name.step >= newest
    assert not (job.run_dir / "resubmitted").exists()
