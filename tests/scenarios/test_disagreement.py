"""Ranks that call different collectives are named, with group and call, instead of hanging without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool.testing.cluster import JobSpec, running

REPORT_S = 2.0


@pytest.mark.full
@pytest.mark.timeout(150)
def test_ranks_that_call_different_collectives_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEADPOOL_LIVENESS_COLLECTIVE_REPORT_S", str(REPORT_S))
    spec = JobSpec(
        script=Path(__file__).parent / "disagreeing.py",
        options=("--nnodes", "2", "--spares", "0", "--collective-timeout-s", "120"),
        run_dir=tmp_path,
    )
    with running(spec) as job:
        event = job.wait_for(lambda event: event["event"] == "collective.disagreement", "disagreement")
        assert event["ranks"] == [0, 1]
        mine, theirs = event["detail"].split("; ")
        assert mine.startswith("rank 0 waits in allreduce of 16 bytes, call ")
        assert mine.endswith("(default_pg, ranks 0,1)")
        assert theirs.startswith("rank 1 waits in allgather of 32 bytes, call 1 of group ")
        assert theirs.endswith("(REMEMBERED_ANSWERS, ranks 0,1)")
        assert "ranks [0, 1] wait for one another" in job.output
        assert not job.named("fault.reported")
