"""One rank's machine: what its worker does when a View says so. Pure.

    PARKED -> RESTORING -> RUNNING -> ABORTING -> RESTORING -> RUNNING ... -> ENDED

[Note: order of an abort] 1 close every handle, so that new calls raise; 2 freeze: no capture that completes
from here on is reported; 3 only then abort the inner communicators. A GPU runs behind its CPU: after an abort
the optimizer's kernel applies garbage, and a capture queued behind it would look complete. Then the worker
waits for two things in any order, the end of the abort and the unwinding of the training function, and acks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from deadpool.core.types import MemberId, Name, Phase, Source, View

REPLACED = 73
"""Exit code of a worker whose rank belongs to another member now."""


class SessionPhase(Enum):
    """Where one rank's worker stands."""

    PARKED = "parked"  # warm, without a generation
    ABORTING = "aborting"
    RESTORING = "restoring"  # builds communicators and state; also at the first start
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """What the worker of one rank knows. Frozen and hashable."""

    rank: int
    member: MemberId  # its agent
    phase: SessionPhase = SessionPhase.PARKED
    view: View | None = None  # newest one seen
    is_closed: bool = True  # the abort of the current generation is through
    is_unwound: bool = True  # the training function is not on the stack
    is_restored: bool = False  # in the current generation
    finished_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSeen:
    """A View arrived."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Handles are closed, captures drained or cancelled, inner communicators aborted, for this generation."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwound:
    """The training function has left the stack because of the abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Communicators of `generation` are built and the state is restored (first start: snapshot 0 taken)."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A step's boundary."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The training function returned: the last step is finished."""


SessionEvent = ViewSeen | Closed | Unwound | Restored | StepFinished | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseHandles:
    """Effect: close every handle of generations up to `generation`; new calls raise CollectiveAborted."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Effect: report no capture from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortInner:
    """Effect: abort all inner communicators, also half-built ones; then feed Closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AckAborted:
    """Effect: tell the agent that this worker is quiet in `generation`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """Effect: build the communicators of `generation`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Effect: restore the state `name` from `source`; then feed Restored."""

    name: Name
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class AckRestored:
    """Effect: tell the agent that this worker can run in `generation`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """Effect: enter the training function behind `step`."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFinished:
    """Effect: tell the agent that the last step is finished in `generation`; stay for recoveries."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Effect: the session is over. 0: return to the caller of `wrap`; else end the process with `code`."""

    code: int


SessionEffect = (
    CloseHandles
    | Freeze
    | AbortInner
    | AckAborted
    | Rebuild
    | Restore
    | AckRestored
    | Enter
    | ReportFinished
    | Exit
)
Outcome = tuple[SessionState, tuple[SessionEffect, ...]]


def step(state: SessionState, event: SessionEvent) -> Outcome:
    """Advance the worker's machine by one event. Pure and total; stale events change nothing."""
    if state.phase is SessionPhase.ENDED:
        return state, ()
    match event:
        case ViewSeen():
            return _on_view(state, event.view)
        case Closed():
            if state.phase is not SessionPhase.ABORTING or event.generation != _generation(state):
                return state, ()
            return _after_abort(replace(state, is_closed=True))
        case Unwound():
            if state.phase is not SessionPhase.ABORTING:
                return state, ()
            return _after_abort(replace(state, is_unwound=True))
        case Restored():
            is_current = event.generation == _generation(state) and not state.is_restored
            if state.phase is not SessionPhase.RESTORING or not is_current:
                return state, ()
            state = replace(state, is_restored=True)
            ack = AckRestored(generation=event.generation)
            state, effects = _enter_if_running(state)
            return state, (ack, *effects)
        case StepFinished():
            if state.phase is not SessionPhase.RUNNING:
                return state, ()  # garbage of an abort: the step is run again
            return replace(state, finished_step=max(state.finished_step, event.step)), ()
        case Done():
            if state.phase is not SessionPhase.RUNNING:
                return state, ()
            return replace(state, is_unwound=True), (ReportFinished(generation=_generation(state)),)
    assert_never(event)


def _on_view(state: SessionState, view: View) -> Outcome:
    old = state.view
    if old is not None and (view.generation, _order(view.phase)) <= (old.generation, _order(old.phase)):
        return state, ()
    is_mine = view.member_of_rank(state.rank) == state.member
    if view.phase in (Phase.FINISHED, Phase.HALTED):
        return replace(state, phase=SessionPhase.ENDED, view=view), (Exit(code=view.exit_code or 0),)
    if not is_mine:
        if state.phase is SessionPhase.PARKED:
            return state, ()
        return replace(state, phase=SessionPhase.ENDED, view=view), (Exit(code=REPLACED),)
    is_new = old is None or view.generation > old.generation
    state = replace(state, view=view)
    if not is_new:
        return _follow_phase(state)
    state = replace(state, is_restored=False)
    if state.phase is SessionPhase.PARKED:  # nothing to abort
        return _follow_phase(replace(state, phase=SessionPhase.RESTORING))
    state = replace(state, phase=SessionPhase.ABORTING, is_closed=False)
    return state, (CloseHandles(generation=view.generation - 1), Freeze(), AbortInner())


def _after_abort(state: SessionState) -> Outcome:
    if not (state.is_closed and state.is_unwound):
        return state, ()
    ack = AckAborted(generation=_generation(state))
    state, effects = _follow_phase(replace(state, phase=SessionPhase.RESTORING))
    return state, (ack, *effects)


def _follow_phase(state: SessionState) -> Outcome:
    """Catch up with the View, which may be ahead: it does not wait for a worker that was given up."""
    view = state.view
    assert view is not None
    if state.phase is not SessionPhase.RESTORING:
        return state, ()
    match view.phase:
        case Phase.FORMING | Phase.RESTORING:
            effects: tuple[SessionEffect, ...] = (Rebuild(generation=view.generation),)
            if view.rollback is not None:
                effects += (Restore(name=view.rollback, source=view.source),)
            return state, effects
        case Phase.RUNNING:
            return _enter_if_running(state)
    return state, ()


def _enter_if_running(state: SessionState) -> Outcome:
    view = state.view
    assert view is not None
    if view.phase is not Phase.RUNNING or not state.is_restored:
        return state, ()
    behind = view.rollback.step if view.rollback else 0
    state = replace(state, phase=SessionPhase.RUNNING, is_unwound=False, finished_step=behind)
    return state, (Enter(step=behind),)


def _generation(state: SessionState) -> int:
    return state.view.generation if state.view else 0


def _order(phase: Phase) -> int:
    return {Phase.FORMING: 0, Phase.ABORTING: 0, Phase.STALLED: 1, Phase.RESTORING: 2, Phase.RUNNING: 3}.get(
        phase, 4
    )
