"""What an agent does before it registers: claim the job, and say who it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deadpool.config import Config
from deadpool.core.types import Member, MemberId
from deadpool.errors import Fenced
from deadpool.membership.claim import claim_job
from deadpool.membership.records import JobClaim
from deadpool.membership.registry import Registry
from deadpool.runtime.servers import Servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an incarnation knows of the job before it has spoken to the control plane."""

    run_id: str  # equal for all agents of one launch; "" if they are started one by one
    token: str  # proposed by this agent, and the first agent's counts; the job's own if this one returns
    is_return: bool = False  # an incarnation before this one was replaced
    member: MemberId = ""  # of a try that did not come as far as registering: one file of events for all
    on_token: Callable[[str], None] | None = None  # told the job's token, once it is known


def claim_token(registry: Registry, config: Config, launch: Launch, host: str) -> str:
    """Claim the job id, or join the job that has it; returns the job's token.

    Args:
        registry: of the job id.
        config: configuration of the job.
        launch: see Launch.
        host: label of this host.

    Raises:
        ConfigError: a live job has this id.
        Fenced: the job turned this host away, or is over; the next incarnation would fare no better.
        StoreUnavailable: the control plane does not answer.
    """
    claim = JobClaim(
        run_id=launch.run_id,
        token=launch.token,
        n_members=config.job.nnodes + config.job.spares,
        claimed_by=f"{socket.gethostname()}:{os.getpid()}",
    )
    if launch.is_return:  # never into another job, and not into a new one that only this host would form
        registry.is_job_of(launch.token, f"before host {host} had come back to it")
        claimed = launch.token
    else:
        claimed = claim_job(registry, claim, config.membership.lease_ttl_s).token
    for quarantine in registry.quarantined():
        if quarantine.host == host:
            raise Fenced(f"this job quarantined host {host}: {quarantine.reason}")
    if launch.on_token is not None:
        launch.on_token(claimed)
    return claimed


def describe_member(
    member: MemberId,
    host: str,
    address: tuple[str, int],
    servers: Servers,
    config: Config,
    versions: Mapping[str, str],
) -> Member:
    """What this agent registers as.

    Args:
        member: this incarnation.
        host: label of this host.
        address: where peers send control messages.
        servers: what else it listens with.
        config: configuration of the job.
        versions: of the packages that must agree across hosts.
    """
    return Member(
        id=member,
        host=host,
        address=address[0],
        control_port=address[1],
        data_port=servers.data_port,
        rendezvous_port=servers.rendezvous_port,
        nproc=config.job.nproc_per_node,
        node_rank=config.run.node_rank,
        domain=config.run.domain,
        versions=tuple(sorted(versions.items())),
        pid=os.getpid(),
    )
