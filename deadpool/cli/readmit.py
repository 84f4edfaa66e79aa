"""`deadpool readmit HOST`: take a quarantined host back into a running job, once it is mended."""

from __future__ import annotations

import contextlib
from pathlib import Path

from deadpool.cli.jobs import find_job_at
from deadpool.errors import ConfigError

TIMEOUT_S = 5.0


def readmit_host(
    host: str, job_id: str | None, etcd: str | None = None, jobs_folder: Path | None = None
) -> str:
    """Lift the quarantine of a host; its next `deadpool run` joins as a spare.

    Returns:
        A sentence that says what was done.

    Raises:
        ConfigError: no such job, or the host is not quarantined.
        StoreUnavailable: etcd does not answer.
    """
    from deadpool.cli.store import open_store
    from deadpool.membership.registry import Registry

    job = find_job_at(job_id, etcd, jobs_folder)
    with contextlib.closing(open_store(job, TIMEOUT_S)) as store:
        registry = Registry(store, job.job_id)
        if not registry.readmit(host):
            hosts = ", ".join(sorted(each.host for each in registry.quarantined())) or "none"
            raise ConfigError(
                [f"host {host!r} is not quarantined in job {job.job_id} (quarantined: {hosts})"]
            )
    return f"host {host} is no longer quarantined in job {job.job_id}; start `deadpool run` on it again"
