"""The status of a job as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deadpool.membership.registry import RECOVERIES_KEPT
from deadpool.report import HostStatus, JobStatus, RankStatus
from deadpool.words import MOST_NAMED, listed

SHOWN_HOSTS = 64
"""Of a job of more hosts, only those hosts and ranks are shown that differ from the rest."""


def describe_status(status: JobStatus, *, show_all: bool = False) -> list[str]:
    """The lines for a terminal.

    Args:
        status: of the job.
        show_all: every host, rank and reason, however many.
    """
    generation = "" if status.generation is None else f", generation {status.generation}"
    lines = [f"job {status.job_id}: {status.phase or 'no view yet'}{generation}"]
    if status.reason:
        lines.append(f"  {status.reason}")
    if status.exit_code is not None:
        return [*lines, f"  it has ended with code {status.exit_code}"]
    if status.waits_for:
        lines.append(f"  waits for {listed(status.waits_for)}")
    lines.append(_count_hosts(status))
    lines.append(_describe_protection(status))
    is_whole = show_all or len(status.hosts) <= SHOWN_HOSTS
    reasons = status.degraded if is_whole else status.degraded[:MOST_NAMED]
    lines.extend(f"degraded: {reason}" for reason in reasons)
    if len(reasons) < len(status.degraded):
        lines.append(f"degraded: and {len(status.degraded) - len(reasons)} more (--all shows them)")
    if status.granted_ttl_s is not None:
        lines.append(f"lease: {status.granted_ttl_s:g} s granted")
    lines.append("")
    lines += _host_table(status.hosts if is_whole else [host for host in status.hosts if _stands_out(host)])
    lines.append("")
    lines += _rank_table(status.ranks if is_whole else _unusual(status.ranks))
    if not is_whole:
        lines += ["", "Hosts and ranks that are as usual are left out (--all shows them)."]
    if status.recoveries:
        count = len(status.recoveries)
        lines += ["", f"recoveries: {f'the newest {count}' if count == RECOVERIES_KEPT else count}"]
        lines.extend(f"  {_describe_recovery(recovery)}" for recovery in status.recoveries)
    return lines


def _count_hosts(status: JobStatus) -> str:
    counted = Counter(host.state for host in status.hosts)
    notes = Counter(host.note for host in status.hosts if host.state in ("active", "spare") and host.note)
    states = ", ".join(f"{count} {state}" for state, count in counted.items()) or "none"
    noted = "".join(f"; {count}: {note}" for note, count in notes.items())
    leader = f"; {status.leader} leads" if status.leader else ""
    return f"hosts: {states}{noted}{leader}"


def _stands_out(host: HostStatus) -> bool:
    return bool(host.note) or host.state not in ("active", "spare")


def _unusual(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """Ranks in another state than most."""
    ((usual, _),) = Counter(rank.state for rank in ranks).most_common(1) or [("", 0)]
    return [rank for rank in ranks if rank.state != usual]


def _host_table(hosts: Sequence[HostStatus]) -> list[str]:
    lines = [f"{'host':12} {'state':12} {'slot':>4} {'ranks':12} {'step':>8}  member"]
    for host in hosts:
        ranks = f"{host.ranks[0]}-{host.ranks[-1]}" if len(host.ranks) > 1 else "".join(map(str, host.ranks))
        slot = "-" if host.slot is None else str(host.slot)
        step = "-" if host.finished_step is None else str(host.finished_step)
        note = f"  ({host.note})" if host.note else ""
        lines.append(
            f"{host.host:12} {host.state:12} {slot:>4} {ranks or '-':12} {step:>8}  {host.member}{note}"
        )
    return lines


def _rank_table(ranks: Sequence[RankStatus]) -> list[str]:
    lines = [f"{'rank':>4} {'slot':>4} {'host':12} {'pid':>8} {'step':>8}  state"]
    for rank in ranks:
        pid = "-" if rank.pid is None else str(rank.pid)
        step = "-" if rank.finished_step is None else str(rank.finished_step)
        lines.append(f"{rank.rank:>4} {rank.slot:>4} {rank.host:12} {pid:>8} {step:>8}  {rank.state}")
    return lines


def _describe_protection(status: JobStatus) -> str:
    protected, at_risk, losses = status.protected, status.steps_at_risk, status.survivable_host_losses
    if protected is None:
        return "not protected: no step is complete on every owner and holder, no host loss is survivable"
    risk = "" if not at_risk else f"; {at_risk} finished steps are not"
    safe = f"protected up to step {protected.step} ({protected.age_s:.1f} s ago){risk}"
    if losses == 0:
        return f"{safe}; but a host is lost by now: no further loss is survivable"
    return f"{safe}; the loss of any {'one host' if losses == 1 else f'{losses} hosts'} is survivable"


def _describe_recovery(recovery: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in recovery.items() if value not in (None, ""))
