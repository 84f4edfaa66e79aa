"""What needs no Slurm to be seen: names, labels, the exit code, the options of nested commands."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.cli.slurm import control_plane, tools
from deadpool.cli.slurm.ending import conclude
from deadpool.cli.slurm.grow import grow
from deadpool.cli.slurm.job import (
    domain_of,
    job_id_of,
    note_end,
    note_grown,
    read_ends,
    read_grown,
    read_job,
    submission_of,
    write_job,
)
from deadpool.cli.slurm.prepare import Wishes, prepare
from deadpool.cli.slurm.script import find_fault, warning_of
from deadpool.cli.slurm.submit_options import submit_options
from deadpool.config import Config, JobConfig
from deadpool.errors import ConfigError
from deadpool.membership.etcd import EtcdStore
from deadpool.runtime.endpoints import etcd_config
from deadpool.runtime.result import note_agent
from tests.unit.cli.slurm_jobs import FINISHED, fake, make_job, write_result


def test_the_job_id_is_that_of_slurm_and_of_the_task_of_an_array() -> None:
    assert job_id_of({"SLURM_JOB_ID": "17"}) == "slurm-17"
    array = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}
    assert job_id_of(array) == "slurm-17-2"


def test_a_requeued_job_gets_a_folder_of_its_own() -> None:
    assert submission_of({"SLURM_JOB_ID": "17"}) == "slurm-17"
    assert submission_of({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}) == "slurm-17.2"


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("spine.leaf3.node17", "switch.switch.node", "spine.leaf3"),
        ("node17", "node", ""),
        ("node17.cluster.example", "node", ""),
        ("", "", ""),
    ],
)
def test_the_failure_domain_is_the_switch_above_a_node(address: str, pattern: str, domain: str) -> None:
    environment = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert domain_of(environment) == domain


def test_what_scontrol_shows_is_read_without_its_empty_values() -> None:
    line = "JobId=7 Account=(null) Requeue=0 SubmitTime=2026-11-30T01:05:11 ReqB:S:C:T=0:0:*:* Power="
    shown = {"JobId": "7", "Requeue": "0", "SubmitTime": "2026-11-30T01:05:11", "ReqB:S:C:T": "0:0:*:*"}
    assert tools.fields_of(line) == shown


def test_nested_commands_do_not_see_the_job_they_are_called_from() -> None:
    environment = {"SLURM_JOB_ID": "1", "SLURM_CONF": "c", "SLURMD_NODENAME": "n", "PATH": "p"}
    assert tools.clean_environment(environment) == {"SLURM_CONF": "c", "PATH": "p"}


def test_a_missing_program_is_named() -> None:
    with pytest.raises(tools.SlurmFailed, match="`no-such-program` is not on PATH"):
        tools.call("no-such-program", "--now")


# ---- the exit code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "ends", "code"),
    [
        (FINISHED, {"n1": 0, "n2": 0}, 0),
        (FINISHED, {"n1": 0}, 0),  # the other one died when all was over
        (FINISHED, {"n1": 0, "n2": 0, "n3": 1}, 0),  # a spare that could not start
        (FINISHED, {"n1": 0, "n2": 1}, 1),  # the script failed behind `wrap`
        (FINISHED, {"n1": 0, "n2": 0, "n3": 5}, 0),  # a node that was cut off
        ({**FINISHED, "exit_code": 3, "phase": "halted"}, {"n1": 3, "n2": 3}, 3),
        (None, {"n1": 143, "n2": 143, "n3": 5}, 143),
        (None, {"n1": 5, "n2": 5}, 5),
        (None, {"n1": 2, "n2": 5}, 2),
        (None, {"n1": 137}, 137),
        (None, {"n1": 0, "n2": 0}, 0),  # the run folder took no result
        (None, {}, 4),
    ],
)
def test_the_code_of_a_job_follows_from_its_result_and_the_hosts_of_its_last_view(
    tmp_path: Path, result: dict[str, object] | None, ends: dict[str, int], code: int
) -> None:
    if result is not None:
        write_result(tmp_path, **result)
    note_agent(tmp_path, "n1-aa", "127.0.0.1", 1)
    for node, end in ends.items():
        note_end(tmp_path, node, end)
    assert read_ends(tmp_path) == ends
    assert conclude(tmp_path)[0] == code


def test_a_job_whose_hosts_never_registered_was_given_something_wrong(tmp_path: Path) -> None:
    code, reason = conclude(tmp_path)
    assert code == 2
    assert reason.startswith("No host came to register")


# ---- etcd ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_nodes", "chosen"), [(1, [0]), (2, [0]), (3, [0, 1, 2]), (4, [0, 1, 2]), (66, [0, 22, 44])]
)
def test_etcd_gets_three_nodes_spread_over_the_allocation_or_one(n_nodes: int, chosen: list[int]) -> None:
    nodes = [f"n{index}" for index in range(n_nodes)]
    members = control_plane.choose_members(nodes, dict.fromkeys(nodes, "10.0.0.1"))
    assert [member.node for member in members] == [nodes[index] for index in chosen]
    ports = [port for member in members for port in (member.client_port, member.peer_port)]
    assert len(set(ports)) == len(ports)


def test_the_certificate_of_a_job_is_signed_for_all_its_members_and_the_authority_is_thrown_away(
    tmp_path: Path,
) -> None:
    tls = control_plane.make_tls(tmp_path / "tls", ["127.0.0.1", "10.0.0.7"])
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == ["ca.crt", "job.crt", "job.key"]
    checks = ["openssl", "verify", "-CAfile", tls.ca, "-verify_ip", "10.0.0.7", tls.cert]
    subprocess.run(checks, check=True, timeout=20, capture_output=True)


def test_the_etcd_program_is_the_named_one_else_that_on_the_path_else_the_embedded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safe = fake(tmp_path, "etcd", "echo etcd Version: 3.5.9")
    unsafe = fake(tmp_path, "other", "echo etcd Version: 3.5.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert control_plane.find_program() == (str(safe), "")
    monkeypatch.setenv("DEADPOOL_ETCD_BIN", str(unsafe))
    program, warning = control_plane.find_program()
    assert program == str(unsafe)
    assert "etcd 3.5.2: it can lose consistency" in warning
    monkeypatch.setenv("DEADPOOL_ETCD_BIN", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is not a program"):
        control_plane.find_program()
    monkeypatch.delenv("DEADPOOL_ETCD_BIN")
    safe.unlink()
    assert control_plane.find_program()[1] == control_plane.UNSAFE_WARNING


def test_a_member_of_etcd_that_is_told_to_end_comes_back_with_what_it_knew(tmp_path: Path) -> None:
    nodes = ["n1"]
    members = control_plane.choose_members(nodes, {"n1": "127.0.0.1"})
    tls = control_plane.make_tls(tmp_path / "tls", ["127.0.0.1"])
    membership = replace(tls, etcd=tuple(member.endpoint for member in members))
    job = make_job(Config(membership=membership), etcd=members)
    with control_plane.serving(job, "n1", tmp_path):
        control_plane.wait_until_reachable(membership)
        with EtcdStore(etcd_config(membership)) as store:
            store.put("/deadpool/a", b"1")
            [first] = pids_of("--initial-cluster-token")
            os.kill(first, signal.SIGTERM)
            deadline_s = time.monotonic() + 20.0
            while pids_of("--initial-cluster-token") in ([], [first]):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            control_plane.wait_until_reachable(membership)
            found = store.get("/deadpool/a")
    assert found is not None
    assert found.value == b"1"


def pids_of(argument: str) -> list[int]:
    """Children of this process with this argument."""
    found = []
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread, or the child, ends just now
            for pid in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
    return found


# ---- the allocation --------------------------------------------------------------------------------------


def test_outside_a_job_prepare_says_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match="this is not a Slurm job"):
        prepare(Config(), Wishes(requeue="none", warning_signal="TERM", grow=False), {})


def test_an_allocation_that_does_not_fit_is_refused_with_every_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        'case "$2" in',
        "hostnames) echo n1; echo n2;;",
        "job) echo JobId=7 BatchHost=n1;;",
        "node) echo NodeName=n1 NodeAddr=127.0.0.1; echo NodeName=n2 NodeAddr=127.0.0.1;;",
        "batch_script) echo '#SBATCH --signal=USR1@60';;",
        "esac",
    ]
    fake(tmp_path, "scontrol", *lines)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    config = Config(job=JobConfig(nnodes=2, spares=1))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    for warning_signal, problem in (
        ("SIGTERM", "no such signal"),
        ("INT", "no step is saved after that one"),
        ("TERM", "sends USR1, which would end the agents with nothing saved"),
    ):
        wishes = Wishes(requeue="no-such-command now", warning_signal=warning_signal, grow=False)
        with pytest.raises(ConfigError) as error:
            prepare(config, wishes, environment)
        problems = error.value.problems
        assert len(problems) == 3
        assert "the allocation has 2 nodes, the job wants 2 active and 1 spare ones" in problems[0]
        assert problem in problems[1]
        assert "`no-such-command` is not on PATH" in problems[2]


def test_a_new_node_is_none_that_the_job_ever_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "salloc", "echo salloc: Granted job allocation 31 >&2")
    fake(tmp_path, "squeue", "echo n9")
    fake(tmp_path, "scontrol", "echo JobId=7 JobState=RUNNING")
    fake(tmp_path, "scancel")
    fake(tmp_path, "srun", "exec sleep 4")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = make_job(Config(), nodes=("n1", "n2"), submit_options=("--partition=long",))
    write_job(run_dir, job)
    assert read_job(run_dir) == job
    assert (run_dir / "slurm.json").stat().st_mode & 0o777 == 0o600
    note_grown(run_dir, "n5")
    assert grow(run_dir, wait_s=20.0) == "n9"
    calls = (tmp_path / "calls").read_text().splitlines()[1:]
    name = "name=deadpool-grow-7"
    assert calls[0] == f"scancel --{name}"
    options = f"--job-{name} --exclude=n1,n2,n5 --partition=long"
    assert calls[1] == f"salloc --no-shell --nodes=1 --dependency=expand:7 {options}"
    assert calls[3] == "scontrol update JobId=31 NumNodes=0"
    assert calls[4].startswith("srun --jobid=7 --no-kill --kill-on-bad-exit=0 --wait=0 --overlap")
    assert read_grown(run_dir) == ("n5", "n9")


def test_a_further_node_and_another_submission_are_asked_for_as_the_job_was() -> None:
    shown = {"TimeLimit": "01:00:00", "Partition": "long", "OverSubscribe": "NO", "QOS": "normal"}
    shown |= {"TresPerNode": "gres:gpu:8", "Features": "a100|h100", "CPUs/Task": "16", "MinMemoryNode": "0"}
    assert set(submit_options(shown, 4)) == {
        *("--time=01:00:00", "--partition=long", "--qos=normal", "--exclusive", "--gres=gpu:8"),
        *("--constraint=a100|h100", "--cpus-per-task=16", "--mem=0"),
    }


@pytest.mark.parametrize(
    ("shown", "options"),
    [
        ({"TresPerNode": "gres/gpu:a100:4", "CPUs/Task": "1"}, {"--gres=gpu:a100:4"}),
        ({"TresPerTask": "gres:gpu:2", "CPUs/Task": "8"}, {"--gpus-per-task=2", "--cpus-per-task=8"}),
        ({"TresPerTask": "cpu=7,gres/gpu=1"}, {"--gpus-per-task=1", "--cpus-per-task=7"}),
        ({"TresPerTask": "cpu:24"}, {"--cpus-per-task=24"}),
        ({"TresPerJob": "gres:gpu:32"}, {"--gpus-per-node=8"}),
        ({"TresPerJob": "gres/gpu:h100:32"}, {"--gpus-per-node=h100:8"}),
        ({"MemPerTres": "gpu:4096", "MinMemoryNode": "0"}, {"--mem-per-gpu=4096M"}),
        ({"MinMemoryCPU": "4G", "OverSubscribe": "OK"}, {"--mem-per-cpu=4G"}),
        ({"TimeLimit": "00:10:00", "TimeMin": "00:05:00"}, set()),
    ],
)
def test_what_a_job_was_given_is_read_as_older_and_newer_slurms_show_it(
    shown: dict[str, str], options: set[str]
) -> None:
    assert set(submit_options(shown, 4)) == options


@pytest.mark.parametrize(
    ("directive", "sent"),
    [
        ("--signal=TERM@120", ("TERM", 120)),
        ("--signal SIGUSR1 # a comment", ("USR1", 60)),
        ("--signal=R:10@9", ("USR1", 9)),
        ("--signal=B:USR1@60", None),
        ("--signal=RB:TERM", None),
        ("--time=10", None),
    ],
)
def test_the_warning_of_a_script_is_the_signal_that_reaches_the_agents(
    directive: str, sent: tuple[str, int] | None
) -> None:
    found = warning_of(f"#!/bin/sh\n\n#SBATCH --no-kill\n#SBATCH {directive}\n")
    assert (found and (found.name, found.seconds)) == sent
    assert warning_of(f"#!/bin/sh\necho Slurm stops reading here\n#SBATCH {directive}\n") is None


def test_a_warning_leaves_the_time_that_the_newest_step_needs() -> None:
    warned = warning_of("#SBATCH --signal=TERM@30\n")
    assert warned is not None
    assert find_fault(warned, "USR1", grace_s=30.0) == ""
    assert "comes 30 s before the end, and --grace-s lets" in find_fault(warned, "TERM", grace_s=60.0)


def test_a_refused_node_says_what_slurm_must_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "scancel")
    fake(tmp_path, "scontrol", "echo JobId=7 JobState=RUNNING")
    fake(tmp_path, "salloc", "echo salloc: error: Job dependency problem >&2", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_job(tmp_path, make_job(Config()))
    with pytest.raises(tools.SlurmFailed, match="permit_job_expansion"):
        grow(tmp_path, wait_s=20.0)


def test_a_job_that_has_ended_takes_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "scontrol", "echo JobId=7 JobState=COMPLETED")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_job(tmp_path, make_job(Config()))
    with pytest.raises(tools.SlurmFailed, match="job 7 is COMPLETED: only a running job can take a node"):
        grow(tmp_path, wait_s=20.0)
