"""`deadpool slurm prepare`: checks the allocation and writes down what all its nodes must know."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deadpool.cli.slurm import control_plane, tools
from deadpool.cli.slurm.job import EtcdNode, SlurmJob, job_id_of, submission_of, write_job
from deadpool.config import Config, MembershipConfig
from deadpool.errors import ConfigError

GROW_WAIT_S = 86400  # in the queue; the request is taken back when the job ends
_DEFAULT_SLURMD_PORT = 6818


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What `prepare` is asked for besides the options of a run."""

    requeue: str
    warning_signal: str
    grow: bool


def prepare(config: Config, wishes: Wishes, environment: Mapping[str, str] = os.environ) -> Path:
    """Write the run folder of this submission; returns its path.

    Raises:
        ConfigError: every problem of the allocation and of the options.
    """
    if "SLURM_JOB_ID" not in environment or "SLURM_JOB_NODELIST" not in environment:
        raise ConfigError(
            ["this is not a Slurm job: call it from a batch script (`deadpool slurm template`)"]
        )
    slurm_id = environment["SLURM_JOB_ID"]
    nodes = tools.expand(environment["SLURM_JOB_NODELIST"])
    task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    array = (task[0], task[1]) if task[0] and task[1] else None
    shown = tools.show_job(slurm_id if array is None else "_".join(array))
    known = tools.show_nodes(nodes)
    problems = _find_problems(config, wishes, nodes)
    if problems:
        raise ConfigError(problems)
    config = _complete(config, environment)
    run_dir = Path(config.run.run_dir)
    try:
        (run_dir / "hosts").mkdir(parents=True)
    except FileExistsError:
        raise ConfigError([f"{run_dir} exists already: call `deadpool slurm prepare` once a job"]) from None
    except OSError as error:
        raise ConfigError([f"run folder {run_dir} cannot be made: {error.strerror}"]) from error
    addresses = _addresses(nodes, known)
    batch_host = shown.get("BatchHost", nodes[0])
    members, membership = _control_plane(config.membership, nodes, addresses, run_dir, environment)
    config = replace(config, membership=membership)
    if wishes.grow and not membership.grow_command:
        command = shlex.join(
            [sys.executable, "-m", "deadpool", "slurm", "grow", "--wait-s", str(GROW_WAIT_S), str(run_dir)]
        )
        config = replace(config, membership=replace(membership, grow_command=command))
    port = int(known[batch_host].get("Port") or _slurmd_port())
    job = SlurmJob(
        slurm_id=slurm_id,
        array=array,
        token=secrets.token_hex(16),
        config=config.to_bytes(),
        nodes=nodes,
        batch_host=batch_host,
        batch_address=(addresses[batch_host], port),
        etcd=members,
        requeue=wishes.requeue,
        warning_signal=wishes.warning_signal,
        submit_options=submit_options(shown),
    )
    _keep_script(slurm_id, run_dir)
    write_job(run_dir, job)
    return run_dir


def _find_problems(config: Config, wishes: Wishes, nodes: Sequence[str]) -> list[str]:
    active, spares = config.job.nnodes, config.job.spares
    problems = []
    if active + spares != len(nodes):
        problems.append(
            f"the allocation has {len(nodes)} nodes, the job wants {active} active and {spares} spare ones: "
            f"let #SBATCH --nodes be {active + spares}, or change --nnodes and --spares"
        )
    if f"SIG{wishes.warning_signal}" not in signal.Signals.__members__:
        problems.append(f"--warning-signal {wishes.warning_signal}: no such signal; give TERM, USR1, ...")
    command = next(iter(shlex.split(wishes.requeue)), "none")
    if command != "none" and shutil.which(command) is None:
        problems.append(f"--requeue {wishes.requeue}: `{command}` is not on PATH here; name another, or none")
    return problems


def _complete(config: Config, environment: Mapping[str, str]) -> Config:
    """Names and folders. All are the same when the job is submitted again, but for the run folder."""
    job_id = config.job.job_id or job_id_of(environment)
    base = Path(config.run.run_dir or Path("deadpool-runs") / job_id).absolute()
    run_dir = base / submission_of(environment)
    return replace(
        config,
        job=replace(config.job, job_id=job_id),
        checkpoint=replace(config.checkpoint, dir=config.checkpoint.dir or str(base / "checkpoints")),
        run=replace(
            config.run,
            run_dir=str(run_dir),
            record_dir=config.run.record_dir and str(Path(config.run.record_dir).absolute()),
            script=str(Path(config.run.script).absolute()),
        ),
    )


def _addresses(nodes: Sequence[str], known: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    names = [known[node].get("NodeAddr", node) for node in nodes]
    return {node: control_plane.address_of(name, names) for node, name in zip(nodes, names, strict=True)}


def _control_plane(
    config: MembershipConfig,
    nodes: Sequence[str],
    addresses: dict[str, str],
    run_dir: Path,
    environment: Mapping[str, str],
) -> tuple[tuple[EtcdNode, ...], MembershipConfig]:
    """Members of the etcd inside the allocation (none for an external one), and how all reach it."""
    external = environment.get("DEADPOOL_ETCD", "")
    if config.etcd or external:
        endpoints = config.etcd or tuple(filter(None, external.split(",")))
        return (), replace(config, etcd=endpoints)
    control_plane.find_program()  # refused here, before anything is started
    members = control_plane.choose_members(nodes, addresses)
    tls = control_plane.make_tls(run_dir / "tls", [member.address for member in members])
    endpoints = tuple(member.endpoint for member in members)
    return members, replace(config, etcd=endpoints, ca=tls.ca, cert=tls.cert, key=tls.key)


def _slurmd_port() -> int:
    for line in tools.call("scontrol", "show", "config").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "SlurmdPort":
            return int(value)
    return _DEFAULT_SLURMD_PORT


def submit_options(shown: Mapping[str, str]) -> tuple[str, ...]:
    """Options that users give on sbatch's command line, so that the script alone would not repeat them."""
    names = {
        "TimeLimit": "--time",
        "Partition": "--partition",
        "Account": "--account",
        "QOS": "--qos",
        "Reservation": "--reservation",
    }
    options = [f"{option}={shown[key]}" for key, option in names.items() if shown.get(key)]
    if shown.get("OverSubscribe") == "NO":
        options.append("--exclusive")
    if shown.get("TresPerNode"):
        options.append(f"--gres={shown['TresPerNode'].replace('gres:', '')}")
    return tuple(options)


def _keep_script(slurm_id: str, run_dir: Path) -> None:
    try:
        tools.call("scontrol", "write", "batch_script", slurm_id, str(run_dir / "job.sbatch"))
    except tools.SlurmFailed as error:
        print(f"deadpool: this job cannot be submitted again: {error}", file=sys.stderr, flush=True)
