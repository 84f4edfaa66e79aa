"""The control plane of a job, for commands. Imports gRPC: import it when it is needed."""

from __future__ import annotations

from pathlib import Path

from deadpool.cli.jobs import JobFile
from deadpool.membership.etcd import EtcdConfig, EtcdStore, parse_endpoints


def open_store(job: JobFile, call_timeout_s: float) -> EtcdStore:
    """A client of the etcd that the job's file names; close it."""
    config = EtcdConfig(
        endpoints=parse_endpoints(",".join(job.etcd)),
        ca_file=Path(job.ca) if job.ca else None,
        cert_file=Path(job.cert) if job.cert else None,
        key_file=Path(job.key) if job.key else None,
        user=job.user or None,
        password=job.password or None,
        call_timeout_s=call_timeout_s,
    )
    return EtcdStore(config)
