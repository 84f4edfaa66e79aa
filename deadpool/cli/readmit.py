"""`deadpool readmit HOST`: take a quarantined host back into a running job, once it is mended."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from deadpool.cli.jobs import find_job_at
from deadpool.errors import ConfigError

TIMEOUT_S = 5.0


def readmit_host(
    host: str, job_id: str | None, etcd: str | None = None, jobs_folder: Path | None = None
) -> str:
    """Lift the quarantine of a host; the next agent that is started there joins as a spare.

    Args:
        host: as `deadpool status` shows it.
        job_id: of a job of this machine, or the run folder of a job under Slurm; None: the only one here.
        etcd: endpoints, for a job that is elsewhere.
        jobs_folder: of the job files.

    Returns:
        What was done, and how an agent is started there again.

    Raises:
        ConfigError: no such job, or the host is not quarantined.
        StoreUnavailable: etcd does not answer.
    """
    from deadpool.cli.store import open_store
    from deadpool.membership.registry import Registry

    try:
        job = find_job_at(job_id, etcd, jobs_folder)
    except ConfigError as error:
        hint = f"under Slurm, give the run folder: deadpool readmit {host} --job-id RUN"
        raise ConfigError([*error.problems, hint]) from error
    with contextlib.closing(open_store(job, TIMEOUT_S)) as store:
        registry = Registry(store, job.job_id)
        if not registry.readmit(host):
            hosts = ", ".join(sorted(each.host for each in registry.quarantined())) or "none"
            raise ConfigError(
                [f"host {host!r} is not quarantined in job {job.job_id} (quarantined: {hosts})"]
            )
    done = f"host {host} is no longer quarantined in job {job.job_id}"
    return f"{done}; start it again{_how_to_start(host, job.run_dir)}"


def _how_to_start(host: str, run_dir: str) -> str:
    from deadpool.cli.slurm.grow import host_step
    from deadpool.cli.slurm.job import is_run, read_job

    if not run_dir or not is_run(Path(run_dir)):
        return " there with `deadpool run`"
    folder = Path(run_dir).absolute()
    command = shlex.join(host_step(folder, read_job(folder), host))
    return f", in the environment of the batch script:\nnohup {command} > /dev/null &"
