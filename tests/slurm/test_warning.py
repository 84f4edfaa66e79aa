"""The signal ahead of the time limit: the newest step is saved, and the job goes on as another submission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.compare import read_records
from deadpool.store.checkpoint import latest_complete
from tests.slurm.conftest import ACTIVE, Rig, StartCluster, Submitted
from tests.slurm.test_node_loss import STRIKE_AT

pytestmark = pytest.mark.full

ARGS = ("--steps", "80", "--step-s", "0.1")


def warn(job: Submitted, signal: str = "TERM") -> int:
    """Let Slurm send what `--signal` makes it send; returns a step: this one or a newer one is saved."""
    job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
    warned_with = int(max(event["step"] for event in job.named("snapshot.committed")))
    job.cluster.call("scancel", f"--signal={signal}", job.slurm_id)
    job.wait_for("checkpoint.complete", step=lambda step: step >= warned_with)
    return warned_with


def check_goes_on(rig: Rig, job: Submitted, again: Submitted, warned_with: int) -> None:
    """The other submission trains on behind the newest step that was saved, bit for bit, and completes."""
    again.wait_for("view.published")  # by then the warned one is gone, and saves nothing newer
    manifest = latest_complete(job.run_dir.parent / "checkpoints")
    assert manifest is not None, job.output
    saved = manifest.name.step
    assert saved >= warned_with
    assert saved in {event["step"] for event in job.named("snapshot.committed")}
    again.wait_for("view.published", phase="finished")
    shown = again.wait_until_gone()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), again.output
    assert again.run_dir.parent == job.run_dir.parent
    undisturbed = rig.undisturbed(ARGS)
    (again.run_dir / "records").symlink_to(again.records_dir)
    for rank in range(ACTIVE):
        steps = read_records(again.run_dir, rank)
        assert min(steps) == saved + 1
        expected = read_records(undisturbed.run_dir, rank)
        assert steps == {step: record for step, record in expected.items() if step > saved}
    rig.check_final_state(again, ARGS)


def test_a_warned_job_saves_its_newest_committed_step_and_goes_on_from_it_as_another_submission(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    job = rig.submit(cluster, tmp_path, ARGS)
    warned_with = warn(job)
    shown = job.wait_until_gone()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "143:0"), job.output
    again = Submitted(cluster, tmp_path, (job.run_dir / "resubmitted").read_text().strip())
    assert again.slurm_id != job.slurm_id
    check_goes_on(rig, job, again, warned_with)


def test_a_task_of_an_array_without_the_callers_environment_goes_on_as_the_same_task(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    # What a user's module or activation line does; nothing else reaches the script.
    names = ("PATH", "SLURM_CONF", "TMPDIR")
    setup = "\n".join(f"export {name}={cluster.environment[name]}" for name in names)
    sbatch = ("--array=3", "--export=NONE", "--signal=USR1@60")
    options = ("--warning-signal", "USR1")
    job = rig.submit(cluster, tmp_path, ARGS, sbatch=sbatch, setup=setup, options=options)
    warned_with = warn(job, "USR1")
    assert job.run_dir.parent.name == f"slurm-{job.slurm_id}-3"
    shown = job.wait_until_gone()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "143:0"), job.output
    again = Submitted(cluster, tmp_path, (job.run_dir / "resubmitted").read_text().strip())
    assert cluster.show(again.slurm_id)["ArrayTaskId"] == "3"
    check_goes_on(rig, job, again, warned_with)


def test_a_warned_job_may_go_on_under_its_own_slurm_id(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    job = rig.submit(cluster, tmp_path, ARGS, options=("--requeue", "scontrol"))
    warned_with = warn(job)
    check_goes_on(rig, job, Submitted(cluster, tmp_path, job.slurm_id, restart=1), warned_with)
