"""How the commands find a running job on this machine: one file per job in the user's runtime directory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from deadpool.cli.slurm.job import is_run, read_job
from deadpool.config import MembershipConfig, load_config
from deadpool.errors import ConfigError


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """`<runtime dir>/deadpool/<job id>.json`, mode 0600: it holds the job's token."""

    job_id: str
    token: str  # a status request that does not show it is not answered
    run_dir: str
    pid: int  # the launcher
    etcd: tuple[str, ...] = ()
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""


def runtime_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of the job files: XDG_RUNTIME_DIR, else /run/user/<uid>, else the temporary folder.

    The last one is shared by all users, so the name then carries the user id.
    """
    named = environment.get("XDG_RUNTIME_DIR", "")
    if named and os.access(named, os.W_OK):
        return Path(named) / "deadpool"
    usual = Path(f"/run/user/{os.getuid()}")
    if os.access(usual, os.W_OK):
        return usual / "deadpool"
    return Path(tempfile.gettempdir()) / f"deadpool-{os.getuid()}"


def write_job_file(job: JobFile, folder: Path | None = None) -> Path:
    """Write the file of a job, readable by its user only; returns its path.

    Raises:
        ConfigError: the folder belongs to somebody else, who could read the token or forge the file.
    """
    folder = folder or runtime_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError([f"{folder} belongs to another user: set XDG_RUNTIME_DIR to a folder of your own"])
    path = folder / f"{job.job_id}.json"
    temporary = folder / f".{job.job_id}.{os.getpid()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(job))
    os.replace(temporary, path)
    return path


@contextmanager
def job_file(job: JobFile, folder: Path | None = None) -> Iterator[None]:
    """Keep the file of a job for the length of a block; of several hosts of one machine, the first does."""
    path = (folder or runtime_dir()) / f"{job.job_id}.json"
    found = _read(path)
    if found is None or not is_running(found.pid):
        write_job_file(job, folder)
    try:
        yield
    finally:
        found = _read(path)
        if found is not None and found.pid == job.pid:
            path.unlink(missing_ok=True)


def note_token(job: JobFile, token: str, folder: Path | None = None) -> None:
    """The job's token is known: agents of this machine can be asked also while etcd is away."""
    found = _read((folder or runtime_dir()) / f"{job.job_id}.json")
    if found is not None and found.pid == job.pid:
        write_job_file(msgspec.structs.replace(found, token=token), folder)


def find_job(job_id: str | None, folder: Path | None = None) -> JobFile:
    """The file of a job; without an id, the only job that runs.

    Raises:
        ConfigError: no such job, or several and no id.
    """
    folder = folder or runtime_dir()
    if job_id is not None:
        job = _read(folder / f"{Path(job_id).name}.json")
        if job is None:
            running = ", ".join(sorted(found.job_id for found in _all_jobs(folder))) or "none"
            raise ConfigError([f"no job {job_id!r} on this machine ({folder}); known jobs: {running}"])
        return job
    running_jobs = [found for found in _all_jobs(folder) if is_running(found.pid)]
    if len(running_jobs) == 1:
        return running_jobs[0]
    if not running_jobs:
        raise ConfigError([f"no job runs on this machine ({folder})"])
    ids = ", ".join(sorted(found.job_id for found in running_jobs))
    raise ConfigError([f"several jobs run on this machine, name one: {ids}"])


def find_job_at(job_id: str | None, etcd: str | None, folder: Path | None = None) -> JobFile:
    """What is needed to ask for a job.

    Args:
        job_id: of a job of this machine, or the run folder of a job under Slurm; None: the only one here.
        etcd: endpoints, for a job that is elsewhere.
        folder: of the job files.

    Raises:
        ConfigError: no such job, or one elsewhere without its name.
    """
    if etcd is None and job_id is not None and is_run(Path(job_id)):
        return _of_slurm(Path(job_id))
    if etcd is None:
        return find_job(job_id, folder)
    if job_id is None:
        raise ConfigError(["with --etcd, name the job: deadpool status JOB --etcd HOST:PORT"])
    access = load_config(environment=os.environ).membership  # DEADPOOL_MEMBERSHIP_CA and the like
    return _elsewhere(job_id, replace(access, etcd=tuple(etcd.split(","))))


def _of_slurm(run_dir: Path) -> JobFile:
    job = read_job(run_dir)
    config = job.decode_config()
    return _elsewhere(config.job.job_id, config.membership, token=job.token, run_dir=str(run_dir))


def _elsewhere(job_id: str, access: MembershipConfig, *, token: str = "", run_dir: str = "") -> JobFile:
    return JobFile(
        job_id=job_id,
        token=token,
        run_dir=run_dir,
        pid=0,
        etcd=access.etcd,
        ca=access.ca,
        cert=access.cert,
        key=access.key,
        user=access.user,
        password=access.password,
    )


def is_running(pid: int) -> bool:
    """Whether a process of this id exists."""
    return pid > 0 and Path(f"/proc/{pid}").exists()


def _all_jobs(folder: Path) -> list[JobFile]:
    found = (_read(path) for path in sorted(folder.glob("*.json"))) if folder.is_dir() else ()
    return [job for job in found if job is not None]


def _read(path: Path) -> JobFile | None:
    try:
        if path.stat().st_uid != os.getuid():
            return None  # not ours: its token would be somebody else's bait
        return msgspec.json.decode(path.read_bytes(), type=JobFile)
    except (OSError, msgspec.MsgspecError):
        return None  # gone meanwhile, or half a file of a crashed machine
