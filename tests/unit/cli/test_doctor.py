"""What the doctor concludes from what it saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deadpool.cli.doctor import Facts, examine
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
        (replace(SOUND, job={**SOUND.job, "Requeue": "1"}), "requeue", "add `#SBATCH --no-requeue`"),
        (replace(SOUND, job={"Requeue": "0", "TimeLimit": "UNLIMITED"}), "time", "add `#SBATCH --time`"),
        (replace(SOUND, spares_left=0), "spares", "deadpool slurm grow"),
        (replace(SOUND, config=GROWING), "growth", "permit_job_expansion"),
        (replace(SOUND, unreachable=("n2:77",)), "ports", "n2:77"),
        (replace(SOUND, own_address="127.0.1.1"), "interface", "set GLOO_SOCKET_IFNAME"),
        (replace(SOUND, environment={"GLOO_SOCKET_IFNAME": "^lo"}), "interface", "lo, eth0"),
        (replace(SOUND, etcd_version=None, etcd_problem="refused"), "etcd", "refused"),
        (replace(SOUND, etcd_problem="etcd 3.5.1 is bad"), "etcd", "DEADPOOL_ETCD_BIN"),
    ],
)
def test_each_fault_is_found_with_its_remedy(facts: Facts, subject: str, remedy: str) -> None:
    wrong = [finding for finding in examine(facts) if not finding.is_good]
    assert [finding.subject for finding in wrong] == [subject], wrong
    assert remedy in wrong[0].text
