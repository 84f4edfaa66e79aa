"""The leader's machine: events in, Views out. Pure.

`step` is the only door. A View is published for every change; agents act on Views and answer with acks.

    FORMING -> RUNNING -> ABORTING -> RESTORING -> RUNNING ... -> FINISHED
                             | |         ^
                             | `-> STALLED (until a spare joins)
                             `---> HALTED
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import assert_never

from deadpool.core import bitset
from deadpool.core.membership_types import (
    Acked,
    AllWait,
    Cause,
    CheckpointFound,
    Effect,
    End,
    Event,
    FaultReported,
    Fence,
    Finished,
    HostReadmitted,
    LeaderElected,
    LeaseExpired,
    Limits,
    MemberJoined,
    PublishView,
    SilencesHeard,
    State,
    StoreReturned,
    Tick,
)
from deadpool.core.recovery import (
    BAD_INPUT,
    USER_ERROR,
    Outcome,
    advance,
    describe,
    end,
    enter_view,
    find_member,
    forget,
    has_ended,
    host_of,
    last_line,
    lose,
    on_deadline,
    open_generation,
    ordinal,
    smallest_cover,
)
from deadpool.core.types import Ack, Fault, FaultKind, Member, Phase, View

MAX_CAUSES = 16
"""Causes remembered: enough for a few faults that alternate."""

__all__ = [
    "Acked",
    "AllWait",
    "Cause",
    "CheckpointFound",
    "Effect",
    "End",
    "Event",
    "FaultReported",
    "Fence",
    "Finished",
    "HostReadmitted",
    "LeaderElected",
    "LeaseExpired",
    "Limits",
    "MemberJoined",
    "PublishView",
    "SilencesHeard",
    "State",
    "StoreReturned",
    "Tick",
    "initial_state",
    "step",
]


def initial_state(limits: Limits, n_slots: int, nproc: int) -> State:
    """The state of an agent that does not lead yet. The first event of a leader is LeaderElected.

    Args:
        limits: deadlines and counts.
        n_slots: active hosts (`--nnodes`).
        nproc: workers per host; rank = slot * nproc + local rank.
    """
    return State(limits=limits, n_slots=n_slots, nproc=nproc)


def step(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """Advance the machine by one event. Pure and total.

    What the agents see and do:
    - FORMING (generation g): start all workers afresh, build, take snapshot 0 and ack FORMING when it is
      complete on owner and holder for all own ranks. With `source` CHECKPOINT, load `rollback` first, which
      then names that snapshot. A fault leads to FORMING in generation g + 1: all workers start again.
    - ABORTING (g + 1): `slots` already names the replacements, so that they can start to build (`joining`).
      Members of `slots` and `leaving` abort, then ack ABORTING with their final inventory, the groups of
      their layouts and the ranks whose worker is gone (`lost_ranks`). Joining members ack at once with what
      they have; who joined in an earlier generation is waited for if without it nothing is live.
    - STALLED (same generation): `rollback` is fixed, a slot is vacant (""). Workers wait in `wrap`; agents
      may write a checkpoint of `rollback`. With `rollback` None it stands for a FORMING that lacks a host:
      stop the workers and wait.
    - RESTORING (same generation): every slot is filled, `rollback` and `source` are fixed. Fetch, rebuild,
      restore, then ack RESTORING. A slot that kept its member though its worker is gone starts a new worker.
    - RUNNING (same generation): resume behind `rollback`. Members in `leaving` until now are fenced.
    - FINISHED and HALTED: end with `exit_code`.

    Events and acks of another generation or phase, repeated or unknown ones change nothing.

    Returns:
        The new state and what is to be done, in order. If a PublishView or a Fence is refused (another agent
        leads now), nothing behind it may be done. A leader's own Fence comes last.
    """
    match event:
        case LeaderElected():
            outcome = _on_elected(state, event)
        case _ if has_ended(state):
            return state, ()
        case MemberJoined():
            outcome = _on_joined(state, event.member)
        case LeaseExpired():
            outcome = _on_expired(state, event)
        case SilencesHeard():
            outcome = _on_silences(state, event)
        case AllWait():
            outcome = _on_all_wait(state, event)
        case FaultReported():
            outcome = _on_fault(state, event.fault, event.now_s)
        case Acked():
            outcome = _on_ack(state, event.ack, event.now_s)
        case HostReadmitted():
            outcome = replace(state, quarantined=state.quarantined - {event.host}), ()
        case StoreReturned():
            grace_until_s = max(state.grace_until_s, event.now_s + 2 * state.limits.lease_ttl_s)
            outcome = replace(state, grace_until_s=grace_until_s), ()
        case Finished():
            outcome = _on_finished(state, event)
        case CheckpointFound():
            outcome = replace(state, checkpoint=event.name), ()
        case Tick():
            outcome = _on_tick(state, event.now_s)
        case _:
            assert_never(event)
    state, effects = outcome
    state, fences = _settle_versions(state, event.now_s)
    state, more = advance(state, event.now_s)
    return state, (*effects, *fences, *more)


def _on_elected(state: State, event: LeaderElected) -> Outcome:
    """Start from what the store says. A phase that was under way goes on; its deadline starts again."""
    state = initial_state(state.limits, state.n_slots, state.nproc)
    state = replace(state, quarantined=frozenset(event.quarantined), checkpoint=event.checkpoint)
    view = event.view
    named = {*view.slots, *view.leaving} if view else set()
    admitted = [member for member in event.members if member.id in named]
    effects: list[Effect] = []
    for member in event.members:
        if member.id in named:
            continue
        if problem := _misfit(state, member, admitted[0] if view and admitted else None):
            state = replace(state, fenced=state.fenced | {member.id})
            effects.append(Fence(member_id=member.id, reason=problem, quarantine=True))
        else:
            admitted.append(member)
    state = replace(state, members=tuple(admitted))
    if view is None:
        return replace(state, deadline_s=event.now_s + state.limits.forming_s), tuple(effects)
    state = enter_view(state, view, event.now_s)
    if has_ended(state):
        return state, (*effects, End(exit_code=view.exit_code or 0, reason=view.reason))
    known = {member.id for member in state.members}
    return replace(
        state,
        carried=frozenset(view.joining),
        missing=frozenset(named - known - {""}),
        grace_until_s=event.now_s + 2 * state.limits.lease_ttl_s,
        attempts=0 if view.phase is Phase.RUNNING else 1,
    ), tuple(effects)


def _on_joined(state: State, member: Member) -> Outcome:
    if member.id in state.fenced:
        return state, (Fence(member_id=member.id, reason="This incarnation was replaced."),)
    if any(m.id == member.id for m in state.members):
        return replace(state, missing=state.missing - {member.id}), ()
    if problem := _misfit(state, member, _right_member(state)):
        state = replace(state, fenced=state.fenced | {member.id})
        return state, (Fence(member_id=member.id, reason=problem, quarantine=True),)
    return replace(state, members=(*state.members, member), missing=state.missing - {member.id}), ()


def _settle_versions(state: State, now_s: float) -> Outcome:
    """Before the first View, what most hosts have is right: stale ones may be the first to register.

    Nobody is turned away before the hosts that are still to come can change nothing, or the time for
    registering is up; of equally many, the oldest registration counts. Then it is settled: those turned away
    are not counted any more, so a few more like them would outnumber the others.
    """
    if state.view is not None or len(state.members) < state.n_slots or _right_member(state):
        return state, ()
    counts = Counter(member.versions for member in state.members).most_common(2)  # of equals, the older first
    if len(counts) < 2:
        return state, ()
    (versions, count), (_, next_count) = counts
    n_to_come = state.n_slots + state.limits.spares - len(state.members)
    is_certain = count >= state.n_slots or n_to_come <= 0 or count > next_count + n_to_come
    is_late = state.deadline_s is not None and now_s >= state.deadline_s
    if not (is_certain or is_late):
        return state, ()
    state = replace(state, versions=versions)
    right = _right_member(state)
    reasons = {member.id: _misfit(state, member, right) for member in state.members}
    fences = tuple(Fence(member_id=id, reason=why, quarantine=True) for id, why in reasons.items() if why)
    return forget(state, [fence.member_id for fence in fences]), fences


def _right_member(state: State) -> Member | None:
    """One that has the versions that the job runs with; None while that is open."""
    if state.view is not None:
        return state.members[0] if state.members else None
    return next((member for member in state.members if member.versions == state.versions), None)


def _misfit(state: State, member: Member, right: Member | None) -> str:
    """Why the job cannot use this member; "" if it can. `right` has the versions that the job runs with."""
    if member.nproc != state.nproc:
        return (
            f"Host {member.host} offers {member.nproc} workers; this job needs {state.nproc} on every host."
        )
    if right is not None and member.versions != right.versions:
        theirs, ours = set(member.versions), set(right.versions)
        return (
            f"Host {member.host} has {_listed(theirs - ours)}, "
            f"host {right.host} has {_listed(ours - theirs)}: every host needs the same."
        )
    return ""


def _listed(versions: Iterable[tuple[str, str]]) -> str:
    return " and ".join(f"{package} {version}" for package, version in sorted(versions)) or "none of these"


def _on_expired(state: State, event: LeaseExpired) -> Outcome:
    view = state.view
    is_named = view is not None and (event.member_id in state.slot_of or event.member_id in view.leaving)
    is_known = is_named or find_member(state, event.member_id) is not None
    if is_known and event.now_s < state.grace_until_s:
        return replace(state, missing=state.missing | {event.member_id}), ()
    return lose(state, [event.member_id], event.now_s, "its lease expired (lease_ttl_s)")


def _on_silences(state: State, event: SilencesHeard) -> Outcome:
    if event.observer in state.fenced:
        return state, ()
    silences = state.silences.say(event.observer, event.silent, event.gone)
    state = replace(state, silences=silences)
    dead = {member for member in (*event.gone, *event.silent) if silences.is_death(member)}
    why = "its process is gone" if dead <= set(event.gone) else "others hear nothing of it (silence_dead_s)"
    return lose(state, sorted(dead), event.now_s, why)


def _on_all_wait(state: State, event: AllWait) -> Outcome:
    """A slow network looks the same: it takes a link that heartbeats find dead to call this a failure."""
    view = state.view
    is_current = view is not None and view.phase is Phase.RUNNING and event.generation == view.generation
    if not is_current or not state.silences.links(state.slot_of):
        return state, ()
    return _suspect(state, event.step, (), event.now_s), ()


def _on_finished(state: State, event: Finished) -> Outcome:
    view = state.view
    slot = state.slot_of.get(event.member_id)
    if view is None or slot is None or view.phase is not Phase.RUNNING or event.generation != view.generation:
        return state, ()
    return replace(state, finished=state.finished | 1 << slot), ()


def _on_ack(state: State, ack: Ack, now_s: float) -> Outcome:
    view = state.view
    if view is None or ack.generation != view.generation or ack.phase is not view.phase:
        return _recall_ack(state, ack, now_s), ()
    slot = state.slot_of.get(ack.member)
    if slot is not None:
        if bitset.has(state.acked, slot) or ack.phase not in (Phase.FORMING, Phase.ABORTING, Phase.RESTORING):
            return state, ()
        accepted = _accept_losses(state, view, ack, slot)
        if accepted is None:
            return _on_fault(state, _lost_worker(ack), now_s)
        state = replace(accepted, acked=state.acked | 1 << slot)
    elif ack.member in view.leaving and ack.phase is Phase.ABORTING:
        bit = 1 << view.leaving.index(ack.member)
        if state.acked_leaving & bit:
            return state, ()
        state = replace(state, acked_leaving=state.acked_leaving | bit)
    else:
        return state, ()
    return (replace(state, acks=(*state.acks, ack)) if ack.phase is Phase.ABORTING else state), ()


def _recall_ack(state: State, ack: Ack, now_s: float) -> State:
    """A leader elected in RESTORING reads what was acked before it: how long restoring may take."""
    view = state.view
    if view is None or ack.generation != view.generation or state.deadline_s is None:
        return state
    if (ack.phase, view.phase) != (Phase.ABORTING, Phase.RESTORING):
        return state
    if any(known.member == ack.member for known in state.acks):
        return state
    deadline_s = max(state.deadline_s, now_s + state.limits.restore_s + ack.restore_extra_s)
    return replace(state, acks=(*state.acks, ack), deadline_s=deadline_s)


def _accept_losses(state: State, view: View, ack: Ack, slot: int) -> State | None:
    """The state if the slot's lost workers are replaced where they are; None if the loss is a new fault."""
    if not ack.lost_ranks:
        return state
    if ack.phase is not Phase.ABORTING:
        return None
    if bitset.has(state.respawning, slot) or ack.member in view.joining:
        return state
    mark = (slot, ack.last_step)
    if state.spares or mark in state.respawned:
        return None
    return replace(state, respawning=state.respawning | 1 << slot, respawned=state.respawned | {mark})


def _lost_worker(ack: Ack) -> Fault:
    return Fault(
        kind=FaultKind.WORKER_EXIT,
        member=ack.member,
        generation=ack.generation,
        ranks=ack.lost_ranks,
        step=ack.last_step,
        detail="found when the phase was acknowledged",
    )


def _on_fault(state: State, fault: Fault, now_s: float) -> Outcome:
    view = state.view
    if fault.kind is FaultKind.SPARE_FAILED and fault.member not in state.slot_of:
        return _quarantine_spare(state, fault)
    if view is None or fault.generation != view.generation:
        return state, ()
    is_joining = view.phase is Phase.RESTORING and fault.member in view.joining
    if fault.kind in (FaultKind.USER_ERROR, FaultKind.BAD_INPUT) and is_joining:
        # The script fails here and ran elsewhere without an error: this host is to blame.
        fault = replace(fault, kind=FaultKind.SPARE_FAILED)
    if fault.kind is FaultKind.COLLECTIVE:
        if view.phase not in (Phase.FORMING, Phase.RUNNING, Phase.RESTORING):
            return state, ()  # the abort itself breaks collectives
        return _suspect(state, fault.step, fault.pairs, now_s), ()
    if fault.kind is FaultKind.SPARE_FAILED:
        reason = describe(state, fault)
        slot = state.slot_of[fault.member]
        state, fences = _quarantine_spare(state, fault)
        state, effects = open_generation(state, now_s, reason, vacate=[slot])
        return state, (*effects, *fences)
    return _on_worker_fault(state, view, fault, now_s)


def _suspect(state: State, step: int, pairs: Sequence[tuple[int, int]], now_s: float) -> State:
    """A collective failed: a death that explains it has `suspect_s` to become known."""
    return replace(
        state,
        suspected_at_s=now_s if state.suspected_at_s is None else state.suspected_at_s,
        suspected_step=max(state.suspected_step, step),
        pairs=tuple(sorted({*state.pairs, *pairs})),
    )


def _quarantine_spare(state: State, fault: Fault) -> Outcome:
    member = find_member(state, fault.member)
    if member is None or (state.view is not None and member.id in state.view.leaving):
        return state, ()
    state = replace(state, quarantined=state.quarantined | {member.host})
    reason = f"Host {member.host} failed as a spare: {last_line(fault.detail) or 'no detail'}."
    return forget(state, [member.id]), (Fence(member_id=member.id, reason=reason, quarantine=True),)


def _on_worker_fault(state: State, view: View, fault: Fault, now_s: float) -> Outcome:
    # A member speaks of its own ranks only: one that leaves its slot may still report what ended there.
    slots = {state.slot_of[fault.member]} if fault.member in state.slot_of else set()
    if fault.ranks:
        slots &= {view.slot_of_rank(rank) for rank in fault.ranks if 0 <= rank < view.world_size}
    if not slots:
        return state, ()
    is_user_error = fault.kind is FaultKind.USER_ERROR
    reason = describe(state, fault)
    if fault.kind is FaultKind.BAD_INPUT:
        return end(state, Phase.HALTED, BAD_INPUT, reason)
    state, count = _count_cause(state, _cause_of(fault))
    if count >= (2 if is_user_error else state.limits.max_attempts):
        return end(state, Phase.HALTED, USER_ERROR, f"{reason} It was the {ordinal(count)} time: giving up.")
    if view.phase is Phase.FORMING and state.attempts >= state.limits.max_attempts:
        return end(state, Phase.HALTED, USER_ERROR, f"{reason} The job could not be formed: giving up.")
    spares = len(state.spares)
    vacate: list[int] = []
    respawning = 0
    for slot in sorted(slots):
        mark = (slot, fault.step)
        if is_user_error or (view.phase is Phase.FORMING and fault.kind is not FaultKind.DEVICE):
            respawning |= 1 << slot
        elif spares or fault.kind is FaultKind.DEVICE or mark in state.respawned:
            vacate.append(slot)
            spares -= 1 if spares else 0
        else:
            respawning |= 1 << slot
            state = replace(state, respawned=state.respawned | {mark})
    if fault.kind is FaultKind.DEVICE:
        hosts = {m.host for m in state.members if m.id in {view.slots[slot] for slot in slots}}
        state = replace(state, quarantined=state.quarantined | hosts)
    return open_generation(state, now_s, reason, vacate=vacate, respawning=respawning)


def _cause_of(fault: Fault) -> Cause:
    if fault.kind is FaultKind.USER_ERROR:
        return Cause(kind=fault.kind, ranks=(), step=fault.step, line=last_line(fault.detail))
    return Cause(kind=fault.kind, ranks=tuple(sorted(fault.ranks)), step=fault.step)


def _count_cause(state: State, cause: Cause) -> tuple[State, int]:
    """Remember `cause`; how often it has come by now."""
    others = []
    for known in state.causes:
        if replace(known, count=1) == cause:
            cause = known
        else:
            others.append(known)
    if others != list(state.causes):
        cause = replace(cause, count=cause.count + 1)
    return replace(state, causes=(*others[-MAX_CAUSES + 1 :], cause)), cause.count


def _on_tick(state: State, now_s: float) -> Outcome:
    if state.missing and now_s >= state.grace_until_s:
        missing = sorted(state.missing)
        return lose(state, missing, now_s, "it did not register again")
    if state.suspected_at_s is not None and now_s >= state.suspected_at_s + state.limits.suspect_s:
        return _resolve_suspicion(state, now_s)
    if state.deadline_s is not None and now_s >= state.deadline_s:
        return on_deadline(state, now_s)
    return state, ()


def _resolve_suspicion(state: State, now_s: float) -> Outcome:
    """Nobody died: try the same members once; if it comes back, replace those whom the reports point at.

    Where heartbeats find a link between two of them dead, too, trying again is known to fail.
    """
    view = state.view
    assert view is not None
    last_s = state.unconfirmed_at_s
    pairs = [(state.slot_of[a], state.slot_of[b]) for a, b in state.silences.links(state.slot_of)]
    if last_s is not None and now_s - last_s < state.limits.recurrence_s:
        pairs += [(view.slot_of_rank(a), view.slot_of_rank(b)) for a, b in state.pairs]
    vacate = smallest_cover(pairs)
    if len(state.spares) < len(vacate) and state.attempts < state.limits.max_attempts:
        vacate = ()  # better a bad link than no job
    reason = "A collective failed and no host is known to be dead; the same hosts try again."
    if vacate:
        links = "; ".join(sorted({_link(state, view, *pair) for pair in pairs if pair[0] != pair[1]}))
        hosts = ", ".join(host_of(state, view.slots[slot]) for slot in vacate)
        reason = f"Collectives fail between hosts that live ({links}): {hosts} is replaced."
    state, count = _count_cause(state, Cause(kind=FaultKind.COLLECTIVE, ranks=(), step=state.suspected_step))
    if not vacate and count > state.limits.max_attempts:
        step_text = f"{count} times at step {state.suspected_step}"
        text = f"Collectives failed {step_text} and no host is to blame: giving up."
        return end(state, Phase.HALTED, USER_ERROR, text)
    return open_generation(replace(state, unconfirmed_at_s=now_s), now_s, reason, vacate=vacate)


def _link(state: State, view: View, a: int, b: int) -> str:
    first, second = sorted((a, b))
    return f"no link between {host_of(state, view.slots[first])} and {host_of(state, view.slots[second])}"
