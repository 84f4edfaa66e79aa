"""How the leader's state moves from View to View. Pure. Events are told apart in membership.py.

[Note: when the verdict is given] What is lost is decided when ABORTING is acked, from inventories taken after
the workers are quiet. At the time of the fault nobody knows which copies are complete: a verdict then would
end jobs whose state is there, or resume from a step that somebody lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from deadpool.core import bitset, placement, plan
from deadpool.core.membership_types import Effect, End, Fence, PublishView, State
from deadpool.core.types import Fault, FaultKind, Member, MemberId, Name, Phase, Source, View

Outcome = tuple[State, tuple[Effect, ...]]

# Exit codes that the core decides on; deadpool.errors.ExitCode documents them.
FINISHED = 0
USER_ERROR = 1
BAD_INPUT = 2
NO_SPARE_LEFT = 3
STATE_LOST = 4


def has_ended(state: State) -> bool:
    """Whether the last View was FINISHED or HALTED."""
    return state.view is not None and state.view.phase in (Phase.FINISHED, Phase.HALTED)


def enter_view(state: State, view: View, now_s: float) -> State:
    """Take `view` as the current one: nothing of its phase is acked, its deadline begins now."""
    limits = state.limits
    limit_s = {
        Phase.FORMING: limits.forming_s,
        Phase.ABORTING: limits.abort_s,
        Phase.RESTORING: limits.restore_s + _restore_extra_s(state),
        Phase.STALLED: limits.spare_wait_s,
    }.get(view.phase)
    is_aborting = view.phase is Phase.ABORTING
    slot_of = state.slot_of
    if state.view is None or state.view.slots != view.slots:
        slot_of = {member: slot for slot, member in enumerate(view.slots) if member}
    waived = {*view.joining, ""} if is_aborting else {""}
    return replace(
        state,
        view=view,
        slot_of=slot_of,
        deadline_s=None if limit_s is None else now_s + limit_s,
        is_extended=False,
        needed=bitset.of(slot for slot, member in enumerate(view.slots) if member not in waived),
        acked=0,
        acked_leaving=0,
        acks=() if is_aborting else state.acks,
        finished=0,
    )


def advance(state: State, now_s: float) -> Outcome:
    """Leave the current phase if all it waits for is there."""
    view = state.view
    if view is None:
        return form(state, now_s, "The first hosts have registered.")
    match view.phase:
        case Phase.FORMING | Phase.RESTORING if state.acked == bitset.full(state.n_slots):
            return _run(state, view, now_s)
        case Phase.ABORTING if _is_aborted(state, view):
            return _fix_rollback(state, view, now_s)
        case Phase.STALLED if view.slots.count("") <= len(state.spares):
            if view.rollback is None:
                return form(state, now_s, "A spare has joined.")
            return _restore(state, view, now_s, "A spare has joined.")
        case Phase.RUNNING if state.finished == bitset.full(state.n_slots):
            return end(state, Phase.FINISHED, FINISHED, "All ranks have finished the last step.")
    return state, ()


def form(state: State, now_s: float, reason: str, vacate: Sequence[int] = ()) -> Outcome:
    """Start all workers afresh, in the first generation or after a fault before snapshot 0 was committed."""
    view = state.view
    fences: list[Effect] = []
    if view is None:
        first = _first_slots(state, is_late=state.deadline_s is not None and now_s >= state.deadline_s)
        if first is None:
            return state, ()
        slots = first
    else:
        slots = list(view.slots)
        for slot in vacate:
            member = slots[slot]
            slots[slot] = ""
            if find_member(state, member):
                fences.append(_fence(state, member, reason))
                state = forget(state, [member])
        _fill(state, slots, view.holders)
    is_whole = "" not in slots
    checkpoint = state.checkpoint if is_whole else None
    new = View(
        generation=1 if view is None else view.generation + 1,
        phase=Phase.FORMING if is_whole else Phase.STALLED,
        slots=tuple(slots),
        nproc=state.nproc,
        rollback=checkpoint,
        source=Source.MEMORY if checkpoint is None else Source.CHECKPOINT,
        rendezvous=_rendezvous(slots, (), ""),
        holders=_place(state, slots, ()),
        reason=reason,
    )
    state = replace(
        state, attempts=state.attempts + 1, suspected_at_s=None, suspected_step=0, pairs=(), respawning=0
    )
    return enter_view(state, new, now_s), (PublishView(view=new), *fences)


def open_generation(
    state: State, now_s: float, reason: str, *, vacate: Sequence[int] = (), respawning: int = 0
) -> Outcome:
    """Publish generation + 1. It takes up all that is known by now of the dead, vacant, joining and leaving.

    Args:
        state: members that are gone have been forgotten (`forget`).
        now_s: now.
        reason: one sentence.
        vacate: slots whose member gives them up; a live one stays as a source until RUNNING.
        respawning: bitset of slots that get a new worker on the same host.
    """
    view = state.view
    assert view is not None
    if view.phase is Phase.FORMING or (view.phase is Phase.STALLED and view.rollback is None):
        return form(state, now_s, reason, vacate)
    alive = {member.id for member in state.members} | state.missing
    slots = list(view.slots)
    leaving = [member for member in view.leaving if member in alive]
    for slot in vacate:
        if slots[slot] in alive:
            leaving.append(slots[slot])
        slots[slot] = ""
    joined = _fill(replace(state, view=replace(view, leaving=tuple(leaving))), slots, view.holders)
    joining = tuple(member for member in view.joining if member in slots) + joined
    new = replace(
        view,
        generation=view.generation + 1,
        phase=Phase.ABORTING,
        slots=tuple(slots),
        joining=joining,
        leaving=tuple(leaving),
        rollback=None,
        source=Source.MEMORY,
        rendezvous=_rendezvous(slots, joining, view.rendezvous),
        holders=_place(state, slots, view.holders),
        reason=reason,
    )
    state = replace(
        state,
        carried=frozenset(joining) - set(joined),
        attempts=state.attempts + 1,
        suspected_at_s=None,
        suspected_step=0,
        pairs=(),
        respawning=respawning,
    )
    return enter_view(state, new, now_s), (PublishView(view=new),)


def lose(state: State, members: Sequence[MemberId], now_s: float, why: str) -> Outcome:
    """These members are gone. Open a generation if the View needs them, or has them as sources."""
    view = state.view
    known = [m for m in members if find_member(state, m) or m in state.missing]
    if not known:
        return state, ()
    hosts = ", ".join(_host_and_ranks(state, member) for member in known)
    reason = f"Host {hosts} is lost: {why}."
    slots = [state.slot_of[member] for member in known if member in state.slot_of]
    is_source = view is not None and any(member in view.leaving for member in known)
    fences = tuple(Fence(member_id=member, reason=reason) for member in known)
    state = forget(state, known)
    if slots or is_source:
        state, more = open_generation(state, now_s, reason, vacate=slots)
        return state, (*more, *fences)
    return state, fences


def forget(state: State, members: Iterable[MemberId]) -> State:
    """These incarnations are gone for good."""
    gone = frozenset(members)
    return replace(
        state,
        members=tuple(m for m in state.members if m.id not in gone),
        missing=state.missing - gone,
        fenced=state.fenced | gone,
        silences=state.silences.without(gone),
    )


def on_deadline(state: State, now_s: float) -> Outcome:
    """Act on a phase that took too long. Every phase but RUNNING, FINISHED and HALTED has a deadline."""
    view = state.view
    limits = state.limits
    if view is None:
        present = len(state.spares)
        if present >= state.n_slots:
            return state, ()  # `advance` now fills the slots of hosts that never came
        limit = f"{limits.forming_s:g} s (forming_timeout_s)"
        text = f"Only {present} of {state.n_slots} hosts registered within {limit}."
        return end(state, Phase.HALTED, NO_SPARE_LEFT, text)
    late = list(bitset.items(state.needed & ~state.acked))
    hosts = ", ".join(host_of(state, view.slots[slot]) for slot in late)
    is_last_try = state.attempts >= limits.max_attempts
    match view.phase:
        case Phase.FORMING:
            reason = (
                f"Snapshot 0 is not complete on {hosts} after {limits.forming_s:g} s (forming_timeout_s)."
            )
            if is_last_try:
                return end(state, Phase.HALTED, USER_ERROR, f"{reason} Giving up.")
            is_theirs = len(late) < state.n_slots and len(late) <= len(state.spares)
            return form(state, now_s, reason, late if is_theirs else ())
        case Phase.ABORTING:
            return _on_abort_deadline(state, view, now_s, [view.slots[slot] for slot in late])
        case Phase.RESTORING:
            limit_s = limits.restore_s + _restore_extra_s(state)
            reason = f"{hosts} did not restore within {limit_s:.0f} s (from rebuild_timeout_s)."
            broken = [view.slots[slot] for slot in late if view.slots[slot] in view.joining]
            if broken:
                bad = {host_of(state, member) for member in broken}
                state = replace(state, quarantined=state.quarantined | bad)
                fences = tuple(Fence(member_id=m, reason=reason, quarantine=True) for m in broken)
                slots = [view.slots.index(member) for member in broken]
                state, effects = open_generation(forget(state, broken), now_s, reason, vacate=slots)
                return state, (*effects, *fences)
            return open_generation(state, now_s, reason, vacate=late if is_last_try else ())
        case Phase.STALLED:
            vacant = [rank for slot in _vacant(view.slots) for rank in view.ranks_of_slot(slot)]
            ranks = ", ".join(map(str, vacant))
            text = f"No spare came within {limits.spare_wait_s:g} s (spare_wait_s) for rank {ranks}."
            return end(state, Phase.HALTED, NO_SPARE_LEFT, text)
    return state, ()


def end(state: State, phase: Phase, exit_code: int, reason: str) -> Outcome:
    """Publish the last View and end the job."""
    old = state.view
    if old is None:
        old = View(generation=1, phase=phase, slots=("",) * state.n_slots, nproc=state.nproc)
    view = replace(old, phase=phase, exit_code=exit_code, reason=reason)
    state = replace(state, view=view, deadline_s=None, suspected_at_s=None)
    return state, (PublishView(view=view), End(exit_code=exit_code, reason=reason))


def smallest_cover(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Few slots that touch every (from, to) pair of slots: the most accused first, a `to` before a `from`."""
    open_pairs = {(a, b) for a, b in pairs if a != b}
    chosen = []
    while open_pairs:
        slots = sorted({slot for pair in open_pairs for slot in pair})
        worst = max(
            slots,
            key=lambda s: (sum(s in pair for pair in open_pairs), sum(s == b for _, b in open_pairs), -s),
        )
        chosen.append(worst)
        open_pairs = {pair for pair in open_pairs if worst not in pair}
    return tuple(sorted(chosen))


def find_member(state: State, member_id: MemberId) -> Member | None:
    """The live member of that id."""
    return next((member for member in state.members if member.id == member_id), None)


def host_of(state: State, member_id: MemberId) -> str:
    """Host name for the operator. Without its record it is told by the id: label, hyphen, random digits."""
    member = find_member(state, member_id)
    return member.host if member else member_id.rpartition("-")[0] or member_id


def _host_and_ranks(state: State, member_id: MemberId) -> str:
    host = host_of(state, member_id)
    if state.view is None or member_id not in state.slot_of:
        return host
    ranks = state.view.ranks_of_slot(state.slot_of[member_id])
    return f"{host} (rank {', '.join(map(str, ranks))})"


def describe(state: State, fault: Fault) -> str:
    """One sentence on a fault."""
    what = {
        FaultKind.WORKER_EXIT: "died",
        FaultKind.WORKER_STUCK: "makes no progress while others wait",
        FaultKind.USER_ERROR: "raised an exception",
        FaultKind.BAD_INPUT: "cannot be protected",
        FaultKind.ABORT_TIMEOUT: "did not abort in time and was killed",
        FaultKind.DEVICE: "has a device error",
        FaultKind.SPARE_FAILED: "failed while joining",
        FaultKind.COLLECTIVE: "failed in a collective",
    }[fault.kind]
    view = state.view
    hosts = {fault.member}
    if view is not None and fault.ranks:
        hosts = {view.member_of_rank(rank) for rank in fault.ranks if 0 <= rank < view.world_size}
    where = ", ".join(sorted(host_of(state, member) for member in hosts))
    who = f"rank {', '.join(map(str, fault.ranks))}" if fault.ranks else "a worker"
    line = last_line(fault.detail)
    return f"On {where}, {who} {what} at step {fault.step}" + (f": {line}" if line else ".")


def last_line(text: str) -> str:
    """Last line of a traceback that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def ordinal(count: int) -> str:
    """Second, third, 4th."""
    return {1: "first", 2: "second", 3: "third"}.get(count, f"{count}th")


def _restore_extra_s(state: State) -> float:
    """Large states and slow scripts take their time; survivors say how much (see Ack)."""
    return max((ack.restore_extra_s for ack in state.acks), default=0.0)


def late_hosts(state: State) -> tuple[str, ...]:
    """Hosts without whose acknowledgement the phase does not go on."""
    view = state.view
    if view is None or view.phase not in (Phase.FORMING, Phase.ABORTING, Phase.RESTORING):
        return ()
    late = [view.slots[slot] for slot in bitset.items(state.needed & ~state.acked)]
    if view.phase is Phase.ABORTING:
        late += [m for index, m in enumerate(view.leaving) if not bitset.has(state.acked_leaving, index)]
    return tuple(host_of(state, member) for member in late)


def _is_aborted(state: State, view: View) -> bool:
    return not state.needed & ~state.acked and state.acked_leaving == bitset.full(len(view.leaving))


def _live_name(state: State, view: View) -> Name | None:
    inventories = [ack.inventory for ack in state.acks if ack.inventory is not None]
    return plan.newest_live_name(view.world_size, inventories, plan.merge_groups(state.acks))


def _on_abort_deadline(state: State, view: View, now_s: float, late: list[MemberId]) -> Outcome:
    late += [m for i, m in enumerate(view.leaving) if not bitset.has(state.acked_leaving, i)]
    if _live_name(state, view) is None:
        late += _silent_carriers(state)
        if not state.is_extended:
            deadline_s = now_s + state.limits.only_copy_extra_s
            return replace(state, is_extended=True, deadline_s=deadline_s), ()
    return lose(state, late, now_s, "it did not acknowledge the abort in time (ack_timeout_s)")


def _fix_rollback(state: State, view: View, now_s: float) -> Outcome:
    """Give the verdict (see [Note: when the verdict is given])."""
    rollback = _live_name(state, view)
    source = Source.MEMORY
    if rollback is None:
        if _silent_carriers(state):
            return state, ()
        rollback, source = state.checkpoint, Source.CHECKPOINT
    if rollback is None:
        text = f"{view.reason} No rank-complete copy is left in memory and there is no checkpoint."
        return end(state, Phase.HALTED, STATE_LOST, text)
    return _restore(state, replace(view, rollback=rollback, source=source), now_s, view.reason)


def _silent_carriers(state: State) -> list[MemberId]:
    """Members that have joined in an earlier generation, may have fetched a copy then, and have not acked."""
    return sorted(m for m in state.carried if not bitset.has(state.acked, state.slot_of[m]))


def _restore(state: State, view: View, now_s: float, reason: str) -> Outcome:
    """Publish RESTORING, or STALLED while a slot stays vacant; the rollback is fixed."""
    slots = list(view.slots)
    joining = view.joining + _fill(state, slots, view.holders)
    new = replace(
        view,
        phase=Phase.STALLED if "" in slots else Phase.RESTORING,
        slots=tuple(slots),
        joining=joining,
        holders=_place(state, slots, view.holders),
        reason=reason,
    )
    return enter_view(state, new, now_s), (PublishView(view=new),)


def _run(state: State, view: View, now_s: float) -> Outcome:
    """Publish RUNNING; what had left is no longer needed."""
    rollback = view.rollback or Name(step=0, generation=view.generation)
    new = replace(view, phase=Phase.RUNNING, joining=(), leaving=(), rollback=rollback)
    leaving = [member for member in view.leaving if find_member(state, member)]
    fences = tuple(_fence(state, member, f"Replaced in generation {view.generation}.") for member in leaving)
    state = replace(
        forget(state, leaving),
        attempts=0,
        suspected_at_s=None,
        suspected_step=0,
        pairs=(),
        respawning=0,
        acks=(),
    )
    return enter_view(state, new, now_s), (PublishView(view=new), *fences)


def _fence(state: State, member: MemberId, reason: str) -> Fence:
    quarantine = host_of(state, member) in state.quarantined
    return Fence(member_id=member, reason=reason, quarantine=quarantine)


def _first_slots(state: State, *, is_late: bool) -> list[MemberId] | None:
    """Slots in order of registration, `node_rank` first; hosts meant as spares step in when time is up.

    None while hosts lack, or while it is open whose versions are right.
    """
    if len(state.members) < state.n_slots or len({member.versions for member in state.members}) > 1:
        return None
    slots = [""] * state.n_slots
    free: list[MemberId] = []
    reserve: list[MemberId] = []
    for member in state.spares:
        wish = member.node_rank
        if wish is None:
            free.append(member.id)
        elif wish < state.n_slots and not slots[wish]:
            slots[wish] = member.id
        else:
            reserve.append(member.id)
    if is_late:
        free += reserve
    for slot in _vacant(slots):
        if not free:
            return None
        slots[slot] = free.pop(0)
    return slots


def _fill(state: State, slots: list[MemberId], holders: placement.Placement) -> tuple[MemberId, ...]:
    """Give vacant slots to spares, in order of registration.

    One that heartbeats find cut off from another host goes last, one that keeps the domain rule first.
    """
    pool = list(state.spares)
    cut = {word[i] for word in state.silences.unheard for i in (0, 1) if word[1 - i] in slots}
    domain_of = {member.id: member.domain for member in state.members}
    chosen = []
    for slot in _vacant(slots):
        if not pool:
            break
        near = set(holders[slot]) | {s for s, entry in enumerate(holders) if slot in entry}
        taken = {domain_of.get(slots[s], "") for s in near} - {""}
        spare = min(pool, key=lambda member: (member.id in cut, member.domain in taken))
        pool.remove(spare)
        slots[slot] = spare.id
        chosen.append(spare.id)
    return tuple(chosen)


def _place(state: State, slots: Sequence[MemberId], current: placement.Placement) -> placement.Placement:
    domain_of = {member.id: member.domain for member in state.members}
    domains = [domain_of.get(member, "") for member in slots]
    return placement.place(state.n_slots, domains, state.limits.replicas, current)


def _rendezvous(slots: Sequence[MemberId], joining: Sequence[MemberId], current: MemberId) -> MemberId:
    if current in slots:
        return current
    staying = [member for member in slots if member and member not in joining]
    return next(iter(staying or [member for member in slots if member]), "")


def _vacant(slots: Sequence[MemberId]) -> list[int]:
    return [slot for slot, member in enumerate(slots) if not member]
