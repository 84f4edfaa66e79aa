"""The signal ahead of the time limit: the newest step is saved, and the job goes on as another submission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.compare import read_records
from deadpool.store.checkpoint import latest_complete
from tests.slurm.conftest import ACTIVE, StartCluster, Submitted
from tests.slurm.test_node_loss import ARGS, STRIKE_AT

pytestmark = pytest.mark.full


def test_a_warned_job_saves_its_newest_committed_step_and_goes_on_from_it_as_another_submission(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4)
    job = rig.submit(cluster, tmp_path, ARGS)
    job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
    warned_with = max(event["step"] for event in job.named("snapshot.committed"))
    cluster.call("scancel", "--signal=TERM", job.slurm_id)  # what --signal=TERM@... makes Slurm do
    shown = job.wait_until_gone()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "143:0"), job.output
    manifest = latest_complete(job.run_dir.parent / "checkpoints")
    assert manifest is not None, job.output
    saved = manifest.name.step
    # Training goes on while the step is written, so newer ones may have been committed after it.
    assert saved >= warned_with
    assert saved in {event["step"] for event in job.named("snapshot.committed")}

    again = Submitted(cluster, tmp_path, (job.run_dir / "resubmitted").read_text().strip())
    assert again.slurm_id != job.slurm_id
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
