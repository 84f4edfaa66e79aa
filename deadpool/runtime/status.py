"""What an agent says of itself and of the job, for `deadpool status`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deadpool.core.types import Phase
from deadpool.events import boottime_s
from deadpool.report import AgentStatus, Protected, WorkerStatus

if TYPE_CHECKING:
    from deadpool.runtime.agent import Agent


def describe(agent: Agent) -> AgentStatus:
    """Read from a connection thread, so nothing here waits or locks for long.

    It may be asked while this host still starts its workers: then it knows of no job yet.
    """
    if not agent.is_member:
        return AgentStatus(
            member=agent.id,
            host=agent.host_label,
            generation=0,
            phase=Phase.FORMING.value,
            workers=_workers(agent),
        )
    view = agent.host.view
    protection = agent.protection
    protected = protection.protected
    lease = agent.lease
    return AgentStatus(
        member=agent.id,
        host=agent.host_label,
        generation=view.generation if view else 0,
        phase=view.phase.value if view else "forming",
        reason=view.reason if view else "",
        slots=view.slots if view else (),
        nproc=view.nproc if view else agent.config.job.nproc_per_node,
        reaches_store=lease is not None and lease.reaches_store,
        granted_ttl_s=lease.granted_ttl_s if lease else None,
        lease_left_s=lease.deadline_s - boottime_s() if lease else None,
        leader=agent.leadership.leader_id,
        waits_for=agent.leadership.late_hosts(),
        suspects=tuple(agent.peers.suspects),
        replaced=agent.leadership.replaced(view.slots) if view else (),
        workers=_workers(agent),
        protected=None
        if protected is None
        else Protected(
            step=protected.step,
            generation=protected.generation,
            age_s=time.monotonic() - protection.protected_since_s,
        ),
        replication_factor=agent.config.store.replication_factor,
        degraded=(*agent.protection_log.degraded, *agent.checkpoints.problems),
        memory_bytes=agent.memory.memory_bytes(),
        bytes_sent=agent.servers.bytes_sent,
    )


def _workers(agent: Agent) -> tuple[WorkerStatus, ...]:
    return tuple(
        WorkerStatus(
            rank=None if worker.handle.is_parked else worker.rank,
            pid=worker.handle.pid,
            state=worker.state.value,
            finished_step=worker.finished_now(),
        )
        for worker in tuple(agent.workforce.workers)
    )
