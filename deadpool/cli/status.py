"""`deadpool status`: asks the control plane and all agents at the same time, and shows what they say.

Nothing here waits longer than `DEADLINE_S`, whoever does not answer. With etcd away the agents are still
asked (at the addresses that the launcher wrote down), what they know is shown, and the exit code is 5.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from deadpool.cli.agents import ask_agent
from deadpool.cli.jobs import JobFile, find_job_at, is_running
from deadpool.cli.rundir import read_agents
from deadpool.core.types import Member, MemberId, Phase, View
from deadpool.errors import ConfigError, ExitCode, MembershipError
from deadpool.membership.registry import RECOVERIES_KEPT
from deadpool.report import AgentStatus, HostStatus, JobStatus, RankStatus

DEADLINE_S = 2.4  # the command itself answers within 3 s, start included
_STORE_TIMEOUT_S = 1.4  # etcd's share of the deadline: agents that only it knows are asked after it
_LAST_ANSWERS_S = 0.3  # left for agents that only etcd knew
_REASON_MARGIN_S = 0.4  # so that the store's own reason arrives before we give up on it

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """What the control plane says."""

    members: tuple[Member, ...] = ()
    view: View | None = None
    quarantined: Mapping[str, str] = field(default_factory=dict)  # host -> reason
    recoveries: tuple[dict[str, Any], ...] = ()
    token: str = ""


def status_command(
    job_id: str | None, *, as_json: bool = False, etcd: str | None = None, jobs_folder: Path | None = None
) -> int:
    """Print the status of a job; returns the exit code.

    Raises:
        ConfigError: no such job.
    """
    job = find_job_at(job_id, etcd, jobs_folder)
    status, problem = gather_status(job)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=1).decode())
    elif status.hosts or not problem:
        print("\n".join(describe_status(status)))
    if problem:
        print(f"control plane unreachable: {problem}", file=sys.stderr)
        return ExitCode.CONTROL_PLANE_UNREACHABLE
    return ExitCode.FINISHED


def gather_status(job: JobFile) -> tuple[JobStatus, str]:
    """Ask everybody within the deadline.

    Returns:
        The status, and why the control plane does not answer ("" if it does).

    Raises:
        ConfigError: the control plane knows no such job.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    # Without the job's token agents do not answer; for hosts that were started one by one etcd has it.
    noted = dict.fromkeys(agent.address for agent in read_agents(Path(job.run_dir)))
    hints = (job.members_hint or tuple(noted)) if job.token else ()
    hinted = {hint: _Question(partial(ask_agent, hint, job.token, deadline_s)) for hint in hints}
    # gRPC takes a third of a second to import, more on a busy machine: that is not etcd's silence.
    import_module("deadpool.membership.etcd")
    store = _Question(partial(_ask_store, job))
    answer = store.wait(min(time.monotonic() + _STORE_TIMEOUT_S, deadline_s - _LAST_ANSWERS_S))
    problem = ""
    if answer is None:
        problem = store.problem or f"no answer from {', '.join(job.etcd)} within {_STORE_TIMEOUT_S:g} s"
        if job.pid and not is_running(job.pid):
            problem += f"; the launcher of the job (pid {job.pid}) has ended"
        answer = StoreAnswer()
    elif not answer.members and answer.view is None and not hints:
        raise ConfigError([f"no job {job.job_id!r} at {', '.join(job.etcd)}"])
    token = job.token or answer.token
    asked = []
    for member in answer.members:
        address = f"{member.address}:{member.control_port}"
        if address not in hinted:
            asked.append(_Question(partial(ask_agent, address, token, deadline_s)))
    replies = [question.wait(deadline_s) for question in [*hinted.values(), *asked]]
    agents = {reply.member: reply for reply in replies if reply is not None}
    return assemble_status(job.job_id, answer, agents, is_reachable=not problem), problem


def assemble_status(
    job_id: str, store: StoreAnswer, agents: Mapping[MemberId, AgentStatus], *, is_reachable: bool
) -> JobStatus:
    """One picture from what the control plane and the agents say. Pure."""
    newest = max(agents.values(), key=lambda agent: agent.generation, default=None)
    view = store.view or _view_of(newest)
    slots = view.slots if view is not None else ()
    nproc = view.nproc if view is not None else 1
    hosts = _hosts(store, agents, slots, nproc, is_reachable)
    names = {host.member: host.host for host in hosts}
    ranks = tuple(
        _rank(slot, nproc, local, slots[slot], names, agents)
        for slot in range(len(slots))
        for local in range(nproc)
    )
    protected = max(
        (agent.protected for agent in agents.values() if agent.protected is not None),
        key=lambda item: (item.generation, item.step, -item.age_s),
        default=None,
    )
    finished = [rank.finished_step for rank in ranks if rank.finished_step is not None]
    degraded = dict.fromkeys(reason for agent in agents.values() for reason in agent.degraded)
    return JobStatus(
        job_id=job_id,
        control_plane="reachable" if is_reachable else "unreachable",
        generation=None if view is None else view.generation,
        phase="" if view is None else view.phase.value,
        reason="" if view is None else view.reason,
        world_size=len(slots) * nproc,
        hosts=hosts,
        ranks=ranks,
        protected=protected,
        survivable_host_losses=max((agent.replication_factor for agent in agents.values()), default=0)
        if protected is not None
        else 0,
        steps_at_risk=max(finished) - protected.step if finished and protected is not None else None,
        degraded=tuple(degraded),
        granted_ttl_s=next((a.granted_ttl_s for a in agents.values() if a.granted_ttl_s is not None), None),
        recoveries=store.recoveries,
    )


def describe_status(status: JobStatus) -> list[str]:
    """The status as text for a terminal."""
    lines = [f"job {status.job_id}: {status.phase or 'no view yet'}, generation {status.generation}"]
    if status.reason:
        lines.append(f"  {status.reason}")
    lines.append("")
    lines.append(f"{'host':12} {'state':12} {'slot':>4} {'ranks':12} {'step':>8}  member")
    for host in status.hosts:
        ranks = ",".join(map(str, host.ranks)) or "-"
        slot = "-" if host.slot is None else str(host.slot)
        step = "-" if host.finished_step is None else str(host.finished_step)
        note = f"  ({host.note})" if host.note else ""
        lines.append(f"{host.host:12} {host.state:12} {slot:>4} {ranks:12} {step:>8}  {host.member}{note}")
    lines.append("")
    lines.append(f"{'rank':>4} {'slot':>4} {'host':12} {'pid':>8} {'step':>8}  state")
    for rank in status.ranks:
        pid = "-" if rank.pid is None else str(rank.pid)
        step = "-" if rank.finished_step is None else str(rank.finished_step)
        lines.append(f"{rank.rank:>4} {rank.slot:>4} {rank.host:12} {pid:>8} {step:>8}  {rank.state}")
    lines.append("")
    lines.append(_describe_protection(status))
    lines.extend(f"degraded: {reason}" for reason in status.degraded)
    if status.granted_ttl_s is not None:
        lines.append(f"lease: {status.granted_ttl_s:g} s granted")
    if status.recoveries:
        count = len(status.recoveries)
        lines.append(f"recoveries: {f'the newest {count}' if count == RECOVERIES_KEPT else count}")
        lines.extend(f"  {_describe_recovery(recovery)}" for recovery in status.recoveries)
    return lines


def _describe_protection(status: JobStatus) -> str:
    protected, at_risk = status.protected, status.steps_at_risk
    if protected is None:
        return "not protected: no step is complete on every owner and holder, no host loss is survivable"
    risk = "" if not at_risk else f"; {at_risk} finished steps are not"
    hosts = "one host" if status.survivable_host_losses == 1 else f"{status.survivable_host_losses} hosts"
    return (
        f"protected up to step {protected.step} ({protected.age_s:.1f} s ago){risk}; "
        f"the loss of any {hosts} is survivable"
    )


def _describe_recovery(recovery: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in recovery.items() if value not in (None, ""))


def _hosts(
    store: StoreAnswer,
    agents: Mapping[MemberId, AgentStatus],
    slots: Sequence[MemberId],
    nproc: int,
    is_reachable: bool,
) -> tuple[HostStatus, ...]:
    """A row for every member that somebody knows, in slots first."""
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
    rows = []
    for member in everybody:
        # Not known otherwise: a member's id is label, hyphen, random digits.
        host = names.get(member) or lost.get(member) or member.rpartition("-")[0]
        agent = agents.get(member)
        slot = slots.index(member) if member in slots else None
        state, note = "active" if slot is not None else "spare", ""
        if is_reachable and member not in registered:
            state, note = "dead", "its lease has ended"
        elif member in doubted:
            state, note = "suspect", "neighbours do not hear it"
        elif agent is None:
            state, note = "suspect", "does not answer"
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


class _Question(Generic[T]):
    """Asks somebody on a thread of its own, so that one who does not answer delays nobody."""

    def __init__(self, ask: Callable[[], T | None]) -> None:
        self._ask = ask
        self._answer: T | None = None
        self.problem = ""
        # A daemon: it is not waited for past the deadline, and the command ends then.
        self._thread = threading.Thread(target=self._run, name="status-question", daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float) -> T | None:
        """The answer, or None if there is none by then (time.monotonic)."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return None if self._thread.is_alive() else self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except (OSError, MembershipError, ConfigError) as error:
            self.problem = str(error)


def _ask_store(job: JobFile) -> StoreAnswer:
    from deadpool.cli.store import open_store
    from deadpool.membership.registry import Registry

    with contextlib.closing(open_store(job, _STORE_TIMEOUT_S - _REASON_MARGIN_S)) as store:
        registry = Registry(store, job.job_id)
        claim, _ = registry.claim()
        return StoreAnswer(
            members=registry.members(),
            view=registry.view()[0],
            quarantined={each.host: each.reason for each in registry.quarantined()},
            recoveries=registry.recoveries(),
            token="" if claim is None else claim.token,
        )
