"""What needs no Slurm to be seen: names, labels, the exit code, the options of nested commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadpool.cli.slurm import control_plane, ending, members, tools
from deadpool.cli.slurm.ending import conclude, submit_again, wait_for_hosts
from deadpool.cli.slurm.grow import grow
from deadpool.cli.slurm.job import (
    SlurmJob,
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
from deadpool.cli.slurm.prepare import Wishes, prepare, submit_options
from deadpool.cli.slurm.script import warning_of
from deadpool.config import Config, JobConfig, MembershipConfig
from deadpool.errors import ConfigError
from deadpool.membership.embedded import EMBEDDED_WARNING, EmbeddedEtcd
from deadpool.membership.etcd import EtcdStore
from deadpool.runtime.endpoints import etcd_config
from deadpool.runtime.result import note_agent


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


def write_result(run_dir: Path, **fields: object) -> None:
    (run_dir / "result.json").write_text(json.dumps({"reason": "It ended.", **fields}))


FINISHED = {"exit_code": 0, "phase": "finished", "members": ["n1-aa", "n2-bb"]}


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


def test_a_job_whose_hosts_never_started_was_given_something_wrong(tmp_path: Path) -> None:
    assert conclude(tmp_path) == (
        2,
        "No host started: is `deadpool` on PATH there? See the logs of the nodes.",
    )


# ---- the wait for the hosts ------------------------------------------------------------------------------


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        yield etcd


def away(endpoint: str = "") -> Config:
    """A job whose etcd is at `endpoint`, or nowhere."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    membership = MembershipConfig(etcd=(endpoint or nowhere,), start_timeout_s=0.0)
    return Config(job=JobConfig(job_id="slurm-7"), membership=membership)


def test_a_silent_etcd_ends_no_job_whose_agents_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "UNREACHABLE_S", 0.0)
    note_end(tmp_path, "n1", 143)  # one host was told to end, and the others go on
    left = members.Members(tmp_path, away())
    with socket.create_server(("127.0.0.1", 0)) as agent:
        note_agent(tmp_path, "n1-aa", "127.0.0.1", 1)
        note_agent(tmp_path, "n2-bb", *agent.getsockname())
        left.ask()
        assert not left.have_ended()
        note_end(tmp_path, "n2", 0)
        assert left.have_ended()


def test_a_short_silence_of_etcd_is_no_end(tmp_path: Path) -> None:
    left = members.Members(tmp_path, away())
    left.ask()
    assert not left.have_ended()
    assert left.missing_s == 0.0


def test_hosts_that_run_on_and_are_not_registered_are_given_up(
    tmp_path: Path, etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "DESERTED_S", 0.5)
    monkeypatch.setattr(ending, "LOOK_S", 0.1)
    wait_for_hosts(tmp_path, make_job(away(etcd.endpoint)), [os.getpid()])
    assert "no host of job slurm-7 has been registered in etcd, and steps run on" in capsys.readouterr().err


def test_the_wait_is_over_when_no_step_runs_and_the_nodes_that_joined_later_have_ended(
    tmp_path: Path,
) -> None:
    note_grown(tmp_path, "n5")
    assert read_grown(tmp_path) == ("n5",)
    note_end(tmp_path, "n5", 0)
    wait_for_hosts(tmp_path, make_job(away()), [])


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


def make_job(config: Config, **fields: Any) -> SlurmJob:
    known = {"slurm_id": "7", "token": "t", "nodes": ("n1",), "batch_host": "n1", "batch_address": None}
    return SlurmJob(config=config.to_bytes(), **{**known, **fields})


def fake(folder: Path, name: str, *lines: str) -> Path:
    """A program that notes its arguments and then does what `lines` say."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", f'echo "{name} $*" >> {folder}/calls', *lines]) + "\n")
    path.chmod(0o755)
    return path


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
    assert control_plane.find_program()[1] == EMBEDDED_WARNING


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
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


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
    fake(tmp_path, "scontrol")
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
    calls = (tmp_path / "calls").read_text().splitlines()
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
    assert set(submit_options(shown)) == {
        *("--time=01:00:00", "--partition=long", "--qos=normal", "--exclusive", "--gres=gpu:8"),
        *("--constraint=a100|h100", "--cpus-per-task=16", "--mem=0"),
    }
    newer = {"TresPerNode": "gres/gpu:4", "MinMemoryCPU": "4G", "CPUs/Task": "1", "OverSubscribe": "OK"}
    assert set(submit_options(newer)) == {"--gres=gpu:4", "--mem-per-cpu=4G"}


@pytest.mark.parametrize(
    ("directive", "sent"),
    [
        ("--signal=TERM@120", "TERM"),
        ("--signal SIGUSR1@60 # a comment", "USR1"),
        ("--signal=R:10@9", "USR1"),
        ("--signal=B:USR1@60", None),
        ("--signal=RB:TERM", None),
        ("--time=10", None),
    ],
)
def test_the_warning_of_a_script_is_the_signal_that_reaches_the_agents(
    directive: str, sent: str | None
) -> None:
    script = f"#!/bin/sh\n\n#SBATCH --no-kill\n#SBATCH {directive}\n"
    assert warning_of(script) == sent
    assert warning_of(f"#!/bin/sh\necho Slurm stops reading here\n#SBATCH {directive}\n") is None


def test_a_refused_node_says_what_slurm_must_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "scancel")
    fake(tmp_path, "salloc", "echo salloc: error: Job dependency problem >&2", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_job(tmp_path, make_job(Config()))
    with pytest.raises(tools.SlurmFailed, match="permit_job_expansion"):
        grow(tmp_path, wait_s=20.0)


# ---- submitting again ------------------------------------------------------------------------------------


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
    assert calls == [f"sbatch --parsable --nodes=2 --qos=normal {tmp_path}/job.sbatch", "id slurm-3"]
    assert (tmp_path / "resubmitted").read_text() == "8\n"


def test_of_an_array_the_task_alone_is_submitted_again_and_its_job_id_arrives_without_an_environment(
    submitted: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    calls = submitted("JobState=RUNNING", array=("6", "1"))
    options = "--nodes=2 --qos=normal --array=1 --export=DEADPOOL_JOB_JOB_ID"
    assert calls == [f"sbatch --parsable {options} {tmp_path}/job.sbatch", "id slurm-3"]


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
