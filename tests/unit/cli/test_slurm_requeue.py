"""A warned job is submitted again: by whom, with what, and when it is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.slurm import requeue, tools
from deadpool.cli.slurm.ending import settle
from deadpool.cli.slurm.requeue import submit_again
from deadpool.config import Config, JobConfig
from tests.unit.cli.slurm_jobs import fake, make_job


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Submits a job again under fake programs; returns what they were called with."""

    def submit(
        shown: str, requeue: str = "sbatch", times: int = 1, sbatch: str = "echo 8", array: Any = None
    ) -> list[str]:
        fake(tmp_path, "scontrol", f"echo JobId=7 {shown}")
        fake(tmp_path, "sbatch", f'echo "id $DEADPOOL_JOB_JOB_ID" >> {tmp_path}/calls', sbatch)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        config = Config(job=JobConfig(job_id="slurm-3"))
        job = make_job(
            config, nodes=("n1", "n2"), requeue=requeue, submit_options=("--qos=normal",), array=array
        )
        for _ in range(times):
            submit_again(tmp_path, job)
        calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
        return [call for call in calls if not call.startswith("scontrol show")]

    return submit


def test_a_warned_job_is_submitted_again_once_under_its_own_job_id(
    submitted: Callable[..., list[str]], tmp_path: Path
) -> None:
    calls = submitted("JobState=RUNNING", times=2)
    options = "--nodes=2 --qos=normal --export=ALL,DEADPOOL_JOB_JOB_ID"
    assert calls == [f"sbatch --parsable {options} {tmp_path}/job.sbatch", "id slurm-3"]
    assert (tmp_path / "resubmitted").read_text() == "8\n"


def test_of_an_array_the_task_alone_is_submitted_again(
    submitted: Callable[..., list[str]], tmp_path: Path
) -> None:
    calls = submitted("JobState=RUNNING", array=("6", "1"))
    options = "--nodes=2 --qos=normal --export=ALL,DEADPOOL_JOB_JOB_ID --array=1"
    assert calls == [f"sbatch --parsable {options} {tmp_path}/job.sbatch", "id slurm-3"]


@pytest.mark.parametrize(
    ("given", "exported"),
    [
        ("", "ALL,DEADPOOL_JOB_JOB_ID"),
        ("ALL", "ALL,DEADPOOL_JOB_JOB_ID"),
        ("NONE", "DEADPOOL_JOB_JOB_ID"),
        ("nil", "DEADPOOL_JOB_JOB_ID"),
        ("PATH,MODE=1", "PATH,MODE=1,DEADPOOL_JOB_JOB_ID"),
        ("DEADPOOL_JOB_JOB_ID", "DEADPOOL_JOB_JOB_ID"),  # of the submission after the first
    ],
)
def test_the_job_id_reaches_another_submission_whatever_sbatch_exports(given: str, exported: str) -> None:
    assert requeue.export_of(given) == exported


def test_a_task_of_an_array_is_never_named_by_its_number_alone() -> None:
    assert make_job(Config(), nodes=("n1",)).command_id == "7"
    assert make_job(Config(), nodes=("n1",), array=("7", "3")).command_id == "7_3"


@pytest.mark.parametrize(
    ("shown", "is_submitted"),
    [
        ("JobState=COMPLETING", False),
        ("JobState=COMPLETING PreemptTime=None", False),
        ("JobState=COMPLETING PreemptTime=2026-11-30T01:33:06", True),
        ("JobState=RUNNING PreemptTime=2026-11-30T01:33:06", True),
        ("JobState=COMPLETING Reason=TimeLimit", True),
        ("JobState=TIMEOUT", True),
    ],
)
def test_a_cancelled_job_is_not_submitted_again_and_a_preempted_one_is(
    submitted: Callable[..., list[str]], shown: str, is_submitted: bool
) -> None:
    assert bool(submitted(shown)) is is_submitted


def test_it_may_be_requeued_by_slurm_or_by_a_command_of_the_user_or_not_at_all(
    submitted: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert submitted("JobState=RUNNING", requeue="none") == []
    calls = submitted("JobState=RUNNING", requeue="scontrol")
    assert calls == ["scontrol update JobId=7 Requeue=1", "scontrol requeue 7"]
    (tmp_path / "resubmitted").unlink()
    fake(tmp_path, "mine")
    assert submitted("JobState=RUNNING", requeue="mine --now 'two words'")[-1] == "mine --now two words"


def test_a_refused_submission_is_said_and_may_be_tried_again(
    submitted: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted("JobState=RUNNING", sbatch="echo no such partition >&2; exit 1")
    assert "submit the job again by hand" in capsys.readouterr().err
    assert not (tmp_path / "resubmitted").exists()


def test_a_submission_that_gets_no_answer_in_time_may_have_been_made_and_is_not_tried_again(
    submitted: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tools, "TOOL_TIMEOUT_S", 3.0)
    calls = submitted("JobState=RUNNING", sbatch="exec sleep 60", times=2)
    assert len([call for call in calls if call.startswith("sbatch")]) == 1
    assert "look with `squeue --me` first" in capsys.readouterr().err
    assert (tmp_path / "resubmitted").read_text() == "unknown\n"


def test_who_finds_another_submitting_the_job_waits_until_that_is_done(
    submitted: Callable[..., list[str]], tmp_path: Path
) -> None:
    mark = tmp_path / "resubmitted"
    mark.touch()
    thread = threading.Thread(target=submitted, args=("JobState=RUNNING",))
    thread.start()
    mark.write_text("8\n")
    thread.join(20.0)
    assert not thread.is_alive()
    assert not (tmp_path / "calls").exists()


def test_a_run_folder_that_cannot_be_read_costs_no_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "resubmitted").mkdir()  # no file
    settle(tmp_path, make_job(Config(), requeue="sbatch"), 143, "The warning signal came.")
    assert "look with `squeue --me` whether the job was submitted again" in capsys.readouterr().err
