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
from deadpool.cli.slurm.job import (
    EtcdNode,
    SlurmJob,
    array_of,
    command_id,
    job_id_of,
    submission_of,
    write_job,
)
from deadpool.cli.slurm.script import find_fault, warning_of
from deadpool.cli.slurm.submit_options import submit_options
from deadpool.config import Config, MembershipConfig
from deadpool.errors import ConfigError

GROW_WAIT_S = 86400  # in the queue; the request is taken back when the job ends
_DEFAULT_SLURMD_PORT = 6818
# These end all at once, cannot be caught, or come of themselves.
_NO_WARNINGS = ("INT", "KILL", "STOP", "CHLD")


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
    array = array_of(environment)
    shown = tools.show_job(command_id(slurm_id, array))
    known = tools.show_nodes(nodes)
    script = _read_script(slurm_id)
    problems = _find_problems(config, wishes, nodes, script, environment)
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
        export=environment.get("SLURM_EXPORT_ENV", ""),
        submit_options=submit_options(shown, len(nodes)),
    )
    if script:
        (run_dir / "job.sbatch").write_text(script)
    write_job(run_dir, job)
    return run_dir


def _find_problems(
    config: Config, wishes: Wishes, nodes: Sequence[str], script: str, environment: Mapping[str, str]
) -> list[str]:
    active, spares = config.job.nnodes, config.job.spares
    problems = []
    if "SLURM_HET_SIZE" in environment:
        problems.append("this is a heterogeneous job: let one component have all nodes")
    if active + spares != len(nodes):
        problems.append(
            f"the allocation has {len(nodes)} nodes, the job wants {active} active and {spares} spare ones: "
            f"let #SBATCH --nodes be {active + spares}, or change --nnodes and --spares"
        )
    warning = wishes.warning_signal
    if f"SIG{warning}" not in signal.Signals.__members__:
        problems.append(f"--warning-signal {warning}: no such signal; give TERM, USR1, ...")
    elif warning in _NO_WARNINGS:
        problems.append(f"--warning-signal {warning}: no step is saved after that one; give TERM, USR1, ...")
    elif (warned := warning_of(script)) is not None:
        problems += filter(None, [find_fault(warned, warning, config.checkpoint.grace_s)])
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


def _read_script(slurm_id: str) -> str:
    try:
        return tools.call("scontrol", "write", "batch_script", slurm_id, "-")
    except tools.SlurmFailed as error:
        print(f"deadpool: this job cannot be submitted again: {error}", file=sys.stderr, flush=True)
        return ""
