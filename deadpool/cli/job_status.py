"""One picture of a job from what the control plane and the agents say. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool.core.types import Member, MemberId, Phase, View
from deadpool.report import AgentStatus, HostStatus, JobStatus, RankStatus
from deadpool.runtime.result import RunResult

_LEASE_ENDED = "its lease has ended"
_UNHEARD = "neighbours do not hear it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """What the control plane says."""

    members: tuple[Member, ...] = ()
    view: View | None = None
    quarantined: Mapping[str, str] = field(default_factory=dict)  # host -> reason
    recoveries: tuple[dict[str, Any], ...] = ()
    token: str = ""


def assemble_status(
    job_id: str,
    store: StoreAnswer,
    agents: Mapping[MemberId, AgentStatus],
    *,
    is_reachable: bool,
    asked: Collection[MemberId],
) -> JobStatus:
    """One picture from what everybody says.

    Args:
        job_id: of the job.
        store: what the control plane says.
        agents: what the agents say that answered.
        is_reachable: whether the control plane answered.
        asked: who was asked in time; the silence of others says nothing.
    """
    newest = max(agents.values(), key=lambda agent: agent.generation, default=None)
    view = store.view or _view_of(newest)
    slots = view.slots if view is not None else ()
    nproc = view.nproc if view is not None else 1
    hosts = _hosts(store, agents, view, is_reachable, asked)
    names = {host.member: host.host for host in hosts}
    ranks = tuple(
        _rank(slot, nproc, local, slots[slot], names, agents)
        for slot in range(len(slots))
        for local in range(nproc)
    )
    # An agent behind in the generation, or cut off, speaks of copies that may be gone by now.
    current = [agent for agent in agents.values() if view is not None and agent.generation == view.generation]
    protected = max(
        (agent.protected for agent in current if agent.protected is not None),
        key=lambda item: (item.generation, item.step, -item.age_s),
        default=None,
    )
    lost = sum(host.slot is not None and host.note in (_LEASE_ENDED, _UNHEARD) for host in hosts)
    copies = max((agent.replication_factor for agent in current), default=0)
    finished = [rank.finished_step for rank in ranks if rank.finished_step is not None]
    degraded = dict.fromkeys(reason for agent in current for reason in agent.degraded)
    # Who does not reach etcd may not have heard that another leads.
    knowing = sorted((agent for agent in current if agent.leader), key=lambda agent: not agent.reaches_store)
    leader = next((agent.leader for agent in knowing), "")
    return JobStatus(
        job_id=job_id,
        control_plane="reachable" if is_reachable else "unreachable",
        generation=None if view is None else view.generation,
        phase="" if view is None else view.phase.value,
        reason="" if view is None else view.reason,
        leader=names.get(leader, ""),
        waits_for=next((agent.waits_for for agent in current if agent.waits_for), ()),
        world_size=len(slots) * nproc,
        hosts=hosts,
        ranks=ranks,
        protected=protected,
        survivable_host_losses=max(0, copies - lost) if protected is not None else 0,
        steps_at_risk=max(finished) - protected.step if finished and protected is not None else None,
        degraded=tuple(degraded),
        granted_ttl_s=next((a.granted_ttl_s for a in agents.values() if a.granted_ttl_s is not None), None),
        recoveries=store.recoveries,
    )


def ended_status(job_id: str, result: RunResult) -> JobStatus:
    """Of a job that is over: how it ended."""
    return JobStatus(
        job_id=job_id,
        control_plane="ended",
        generation=result.generation or None,
        phase=result.phase or "ended",
        reason=result.reason,
        exit_code=result.exit_code,
        world_size=0,
        hosts=(),
        ranks=(),
        protected=None,
        steps_at_risk=None,
        survivable_host_losses=0,
        degraded=(),
        granted_ttl_s=None,
        recoveries=(),
    )


def _hosts(
    store: StoreAnswer,
    agents: Mapping[MemberId, AgentStatus],
    view: View | None,
    is_reachable: bool,
    asked: Collection[MemberId],
) -> tuple[HostStatus, ...]:
    """A row for every member that somebody knows, in slots first."""
    slots = view.slots if view is not None else ()
    nproc = view.nproc if view is not None else 1
    registered = {member.id: member.host for member in store.members}
    names = {**registered, **{agent.member: agent.host for agent in agents.values()}}
    doubted = {member for agent in agents.values() for member in agent.suspects}
    lost = {  # the leader's summaries name whom each recovery replaced
        str(recovery["subject"]): str(recovery.get("host", ""))
        for recovery in store.recoveries
        if recovery.get("subject")
    }
    replaced = {str(member) for recovery in store.recoveries for member in recovery.get("replaced") or ()}
    # Until the leader has summed the newest one up, the agents know; some may be a View behind.
    replaced |= {each for agent in agents.values() for each in (*agent.slots, *agent.replaced) if each}
    everybody = dict.fromkeys([*filter(None, slots), *registered, *agents, *sorted(replaced), *lost])
    slot_of = {member: slot for slot, member in enumerate(slots) if member}
    rows = []
    for member in everybody:
        # Not known otherwise: a member's id is label, hyphen, random digits.
        host = names.get(member) or lost.get(member) or member.rpartition("-")[0]
        agent = agents.get(member)
        slot = slot_of.get(member)
        state, note = "active" if slot is not None else "spare", ""
        if is_reachable and member not in registered:
            state, note = "dead", _LEASE_ENDED
        elif view is not None and member in view.leaving:
            state, note = "suspect", "its slot has moved: it is only read from"
        elif member in doubted:
            state, note = "suspect", _UNHEARD
        elif agent is None and slot is None and member not in registered:
            state, note = "dead", "it was replaced"
        elif agent is None and member in asked:
            state, note = "suspect", "does not answer"
        elif agent is None:
            note = "could not be asked"
        elif not agent.reaches_store:
            note = "does not reach etcd"
        elif view is not None and member in view.joining:
            note = "takes the slot over"
        if host in store.quarantined and state in ("spare", "suspect", "dead") and slot is None:
            state, note = "quarantined", store.quarantined[host]
        steps = [worker.finished_step for worker in agent.workers if worker.rank is not None] if agent else []
        rows.append(
            HostStatus(
                member=member,
                host=host,
                state=state,
                slot=slot,
                ranks=tuple(range(slot * nproc, (slot + 1) * nproc)) if slot is not None else (),
                finished_step=min(steps, default=None),
                lease_left_s=agent.lease_left_s if agent else None,
                note=note,
            )
        )
    seen = {row.host for row in rows}
    rows.extend(
        HostStatus(member="", host=host, state="quarantined", note=reason)
        for host, reason in store.quarantined.items()
        if host not in seen
    )
    return tuple(rows)


def _rank(
    slot: int,
    nproc: int,
    local: int,
    member: MemberId,
    names: Mapping[MemberId, str],
    agents: Mapping[MemberId, AgentStatus],
) -> RankStatus:
    rank = slot * nproc + local
    agent = agents.get(member)
    worker = next((each for each in agent.workers if each.rank == rank), None) if agent is not None else None
    if worker is None:
        state = "unknown" if member else "vacant"
        return RankStatus(rank=rank, slot=slot, member=member, host=names.get(member, ""), state=state)
    return RankStatus(
        rank=rank,
        slot=slot,
        member=member,
        host=names.get(member, ""),
        pid=worker.pid,
        state=worker.state,
        finished_step=worker.finished_step,
    )


def _view_of(agent: AgentStatus | None) -> View | None:
    """The View as an agent tells it, for when the control plane does not answer."""
    if agent is None or not agent.slots:
        return None
    return View(
        generation=agent.generation,
        phase=Phase(agent.phase),
        slots=agent.slots,
        nproc=agent.nproc,
        reason=agent.reason,
    )
