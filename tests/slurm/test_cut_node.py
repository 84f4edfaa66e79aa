"""A node that nobody hears any more, though it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import StartCluster
from tests.slurm.test_node_loss import ARGS, STRIKE_AT

pytestmark = pytest.mark.full


def test_a_node_cut_from_the_network_is_replaced_and_the_job_completes(
    rig: Any, start_cluster: StartCluster, tmp_path: Path
) -> None:
    cluster = start_cluster(4, is_cuttable=True)
    job = rig.submit(cluster, tmp_path, ARGS)
    job.wait_for("snapshot.committed", step=lambda step: step >= STRIKE_AT)
    victim = next(job.node_of(rank) for rank in range(3) if job.node_of(rank) != "n1")
    cluster.cut_node(victim)
    job.wait_for("recovery.done")
    shown = job.check_gone_soon_after("finished")
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), job.output
    rig.check_identical(job, ARGS)
