"""What every node of a Slurm job knows: `slurm.json` in the run folder, written once by `prepare`.

The run folder is shared by all nodes, and readable by its user only: it holds the job's token and keys.

    <base>/                      deadpool-runs/<job id>, or --run-dir
        checkpoints/             unless --checkpoint-dir names another folder; kept across submissions
        slurm-<id>[.<restart>]/  one per submission: events, records, logs of the nodes, slurm.json
            hosts/<node>.json    how the host of a node ended
            grown                nodes that joined later, or again
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deadpool.config import Config
from deadpool.errors import ConfigError
from deadpool.runtime.result import write_json

_FILE = "slurm.json"
_GROWN = "grown"  # a node per line


class EtcdNode(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the etcd inside the allocation."""

    node: str
    address: str  # IP
    client_port: int
    peer_port: int

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.client_port}"


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """One submission of a job."""

    slurm_id: str  # of this job alone, what srun and salloc take
    array: tuple[str, str] | None = None  # id of the array, and this task's in it
    token: str
    config: bytes  # of the job, complete
    nodes: tuple[str, ...]  # the allocation as it was at the start
    batch_host: str
    batch_address: tuple[str, int] | None  # slurmd of the batch host; None: not known
    etcd: tuple[EtcdNode, ...] = ()  # () for an external one
    requeue: str = "sbatch"  # sbatch, scontrol, none, or a command
    warning_signal: str = "TERM"
    export: str = ""  # what sbatch was told to export; "": everything
    submit_options: tuple[str, ...] = ()  # of sbatch and salloc, as this job was given them

    @property
    def command_id(self) -> str:
        return command_id(self.slurm_id, self.array)

    def decode_config(self) -> Config:
        return Config.from_bytes(self.config)


class HostEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the agent of a node ended."""

    node: str
    code: int


def write_job(run_dir: Path, job: SlurmJob) -> None:
    """Write the file, readable by its user only."""
    path = run_dir / _FILE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(job))


def is_run(folder: Path) -> bool:
    """Whether `prepare` has made this folder."""
    return (folder / _FILE).is_file()


def read_job(run_dir: Path) -> SlurmJob:
    """Read the file.

    Raises:
        ConfigError: `run_dir` is not what `deadpool slurm prepare` printed.
    """
    path = run_dir / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=SlurmJob)
    except OSError as error:
        raise ConfigError(
            [f"{path} cannot be read: {error.strerror}; give the folder that `slurm prepare` printed"]
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError([f"{path} is not of this version of DeadPool: {error}"]) from error


def note_end(run_dir: Path, node: str, code: int) -> None:
    """Say how the host of a node ended."""
    write_json(end_file(run_dir, node), {"node": node, "code": code})


def end_file(run_dir: Path, node: str) -> Path:
    """Where `note_end` says it."""
    return run_dir / "hosts" / f"{node}.json"


def read_ends(run_dir: Path) -> dict[str, int]:
    """Exit codes of the hosts that have ended, by node. A node that was lost has none."""
    ends = (json.loads(path.read_bytes()) for path in (run_dir / "hosts").glob("*.json"))
    return {str(end["node"]): int(end["code"]) for end in ends}


def note_grown(run_dir: Path, node: str) -> None:
    """Say that a node has joined the allocation, or its host was started again."""
    with open(run_dir / _GROWN, "a", encoding="utf-8") as file:
        file.write(f"{node}\n")


def read_grown(run_dir: Path) -> tuple[str, ...]:
    """Nodes whose hosts were started after the batch script's, those that never came up included."""
    try:
        return tuple((run_dir / _GROWN).read_text(encoding="utf-8").split())
    except FileNotFoundError:
        return ()


def job_id_of(environment: Mapping[str, str]) -> str:
    """DeadPool's job id for a Slurm job: `slurm-<id>`, for a task of an array `slurm-<array id>-<task>`."""
    return "-".join(("slurm", *(array_of(environment) or (environment["SLURM_JOB_ID"],))))


def submission_of(environment: Mapping[str, str]) -> str:
    """Name of this submission's folder: Slurm's job id, and how often Slurm itself has requeued it."""
    return submission_name(environment["SLURM_JOB_ID"], environment.get("SLURM_RESTART_COUNT", "0"))


def submission_name(slurm_id: str, restart: str) -> str:
    """Name of a submission's folder; `restart` is "0" for the first run of this Slurm job."""
    return f"slurm-{slurm_id}" + (f".{restart}" if restart != "0" else "")


def array_of(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Id of the array and number of the task in it; None outside of arrays."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return (array, task) if array and task else None


def command_id(slurm_id: str, array: tuple[str, str] | None) -> str:
    """What scancel and scontrol take: they read the number of an array's last task as the whole array."""
    return slurm_id if array is None else "_".join(array)


def own_command_id(environment: Mapping[str, str]) -> str | None:
    """What scontrol takes for the job that this process belongs to; None outside of jobs."""
    slurm_id = environment.get("SLURM_JOB_ID")
    return None if slurm_id is None else command_id(slurm_id, array_of(environment))


def domain_of(environment: Mapping[str, str]) -> str:
    """Failure domain of this node: its leaf switch and all above; "" on a flat network.

    Slurm tells it where a topology is configured: `spine.leaf3.node17` with the pattern `switch.switch.node`.
    """
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(names) != len(kinds):
        return ""  # a node name with a dot in it, or no topology
    return ".".join(name for name, kind in zip(names, kinds, strict=True) if kind != "node")
