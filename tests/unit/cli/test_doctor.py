"""What the doctor concludes from what it saw."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deadpool.cli import doctor
from deadpool.cli.doctor import Facts, doctor_command, examine, find_run, gather
from deadpool.cli.slurm.job import write_job
from deadpool.cli.slurm.template import job_template
from deadpool.cli.slurm.tools import SlurmSilent
from deadpool.config import Config, JobConfig, MembershipConfig
from deadpool.core.types import Phase, View
from deadpool.errors import ConfigError
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdStore
from deadpool.membership.registry import Registry
from deadpool.runtime.endpoints import etcd_config
from tests.unit.cli.slurm_jobs import away, fake, make_job

SOUND = Facts(
    job={"Requeue": "0", "TimeLimit": "1-00:00:00"},
    script=job_template(),
    config=Config(job=JobConfig(nnodes=3, spares=1), membership=MembershipConfig(etcd=("h:1",))),
    etcd_version="3.5.9",
    phase=Phase.RUNNING,
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
        *("no-kill", "signal", "requeue", "time", "phase", "spares", "ports", "interface", "etcd")
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
        (
            replace(SOUND, phase=Phase.STALLED, reason="Host n2 is lost.", spares_left=None),
            "phase",
            "stalled: Host n2 is lost. Training stands still until a node comes, 300 s (spare_wait_s)",
        ),
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
    wrong = [finding for finding in examine(facts) if finding.is_good is False]
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
    assert findings["interface"].is_good is None
    assert "seen on a node only" in findings["interface"].text


def test_what_slurm_does_not_tell_is_no_fault() -> None:
    silent = SlurmSilent("`scontrol` did not answer within 8 s")
    findings = examine(replace(SOUND, config=GROWING, script=silent, scheduler=silent))
    unseen = {finding.subject: finding.text for finding in findings if not finding.is_good}
    assert unseen.keys() == {"no-kill, signal", "growth"}
    assert all("did not answer within 8 s" in text for text in unseen.values())
    assert all(finding.is_good is not False for finding in findings), findings


def test_spares_that_etcd_does_not_tell_of_are_not_called_missing() -> None:
    facts = replace(SOUND, etcd_version=None, etcd_problem="refused", phase=None, spares_left=None)
    [spares] = [finding for finding in examine(facts) if finding.subject == "spares"]
    assert (spares.is_good, spares.text) == (None, "1 asked for; etcd does not tell how many are left")


def test_a_slow_slurmctld_is_told_apart_from_a_setting_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = away()
    grows = replace(config, membership=replace(config.membership, grow_command="grow"))
    write_job(tmp_path, make_job(grows))
    shown = "echo JobId=7 JobState=RUNNING Requeue=0 TimeLimit=1:00:00"
    fake(tmp_path, "scontrol", 'case "$2" in', f"job) {shown};;", "*) exec sleep 60;;", "esac")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "SLURM_LIMIT_S", 1.0)
    began_s = time.monotonic()
    assert doctor_command(tmp_path, "7", {}) == 2  # etcd is nowhere
    assert time.monotonic() - began_s < 10.0
    said = {line.split(": ")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"unseen  growth", "unseen  no-kill, signal", "change  etcd"} <= said


def test_of_a_job_that_stands_still_the_phase_is_told_and_no_next_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(tmp_path, "scontrol", "echo JobId=7 JobState=RUNNING Requeue=0 TimeLimit=1:00:00")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        config = away(etcd.endpoint)
        write_job(tmp_path, make_job(config))
        view = View(
            generation=2, phase=Phase.STALLED, slots=("n1-aa", ""), nproc=1, reason="Host n2 is lost."
        )
        with EtcdStore(etcd_config(config.membership)) as store:
            store.put(Registry(store, config.job.job_id).view_key, msgspec.json.encode(view))
        doctor_command(tmp_path, "7", {})
    said = capsys.readouterr().out
    assert "change  phase: stalled: Host n2 is lost. Training stands still" in said
    assert "the next loss stops the job" not in said


def test_a_job_that_slurmctld_does_not_tell_of_in_time_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, "scontrol", "exec sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "SLURM_LIMIT_S", 0.5)
    with pytest.raises(ConfigError, match=r"show job .*did not answer within 0\.5 s"):
        gather(None, "7", {})
