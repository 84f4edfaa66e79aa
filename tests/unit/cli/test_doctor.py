"""What the doctor concludes from what it saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.cli.doctor import Facts, examine, find_run
from deadpool.cli.slurm.template import job_template
from deadpool.config import Config, JobConfig, MembershipConfig

SOUND = Facts(
    job={"Requeue": "0", "TimeLimit": "1-00:00:00"},
    script=job_template(),
    config=Config(job=JobConfig(nnodes=3, spares=1), membership=MembershipConfig(etcd=("h:1",))),
    etcd_version="3.5.9",
    spares_left=1,
    asked=12,
    own_address="10.0.0.1",
    interfaces=("lo", "eth0"),
    environment={"SLURM_JOB_ID": "7"},
)
GROWING = Config(job=JobConfig(nnodes=3), membership=MembershipConfig(etcd=("h:1",), grow_command="grow now"))


def test_a_sound_allocation_needs_no_change() -> None:
    findings = examine(SOUND)
    assert {finding.subject for finding in findings} == {
        *("no-kill", "signal", "requeue", "time", "spares", "ports", "interface", "etcd")
    }
    assert all(finding.is_good for finding in findings), findings


@pytest.mark.parametrize(
    ("facts", "subject", "remedy"),
    [
        (replace(SOUND, script="#SBATCH --signal=TERM@9\n"), "no-kill", "add `#SBATCH --no-kill`"),
        (replace(SOUND, script="#SBATCH -k\n"), "signal", "--signal=TERM@120"),
        (replace(SOUND, script="#SBATCH -k --signal=B:TERM@9\n"), "signal", "without `B:`"),
        (
            replace(SOUND, warning_signal="USR1", script="#SBATCH -k --signal=USR2@9\n"),
            "signal",
            "--warning-signal USR2",
        ),
        (replace(SOUND, config=None, folders=(Path("/x"),)), "run folder", "below /x/deadpool-runs"),
        (replace(SOUND, job={**SOUND.job, "Requeue": "1"}), "requeue", "add `#SBATCH --no-requeue`"),
        (replace(SOUND, job={"Requeue": "0", "TimeLimit": "UNLIMITED"}), "time", "add `#SBATCH --time`"),
        (replace(SOUND, spares_left=0), "spares", "deadpool slurm grow"),
        (replace(SOUND, config=GROWING), "growth", "permit_job_expansion"),
        (replace(SOUND, unreachable=("n2:77",)), "ports", "n2:77"),
        (replace(SOUND, own_address="127.0.1.1"), "interface", "set GLOO_SOCKET_IFNAME"),
        (
            replace(SOUND, environment={"SLURM_JOB_ID": "7", "GLOO_SOCKET_IFNAME": "^lo"}),
            "interface",
            "lo, eth0",
        ),
        (replace(SOUND, etcd_version=None, etcd_problem="refused"), "etcd", "refused"),
        (replace(SOUND, etcd_silent=("h:2",)), "etcd members", "h:2 accept no connection"),
        (replace(SOUND, job={**SOUND.job, "JobState": "COMPLETED"}), "job", "COMPLETED: the job has ended"),
        (replace(SOUND, etcd_problem="etcd 3.5.1 is bad"), "etcd", "DEADPOOL_ETCD_BIN"),
    ],
)
def test_each_fault_is_found_with_its_remedy(facts: Facts, subject: str, remedy: str) -> None:
    wrong = [finding for finding in examine(facts) if not finding.is_good]
    assert [finding.subject for finding in wrong] == [subject], wrong
    assert remedy in wrong[0].text


def test_a_job_that_waits_for_its_nodes_lacks_nothing() -> None:
    findings = examine(replace(SOUND, job={**SOUND.job, "JobState": "PENDING"}, config=None))
    assert all(finding.is_good for finding in findings), findings


def test_the_folder_of_a_job_is_that_of_its_newest_requeue(tmp_path: Path) -> None:
    names = ["slurm-3/slurm-7", "slurm-3/slurm-7.2", "slurm-3/slurm-7.10", "slurm-70/slurm-70", "a/slurm-7.x"]
    for name in names:
        folder = tmp_path / "deadpool-runs" / name
        folder.mkdir(parents=True)
        (folder / "slurm.json").touch()
    assert find_run([tmp_path / "elsewhere", tmp_path], "7") == tmp_path / "deadpool-runs/slurm-3/slurm-7.10"
    assert find_run([tmp_path], "70") == tmp_path / "deadpool-runs/slurm-70/slurm-70"
    assert find_run([tmp_path], "8") is None


def test_the_interface_is_not_judged_by_a_machine_outside_of_the_job() -> None:
    findings = {
        finding.subject: finding
        for finding in examine(replace(SOUND, own_address="127.0.1.1", environment={}))
    }
    assert findings["interface"].is_good
    assert "seen on a node only" in findings["interface"].text
