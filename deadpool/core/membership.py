"""The leader's machine: events in, Views out. Pure.

`step` is the only door. A View is published for every change; agents act on Views and answer with acks.

    FORMING -> RUNNING -> ABORTING -> RESTORING -> RUNNING ... -> FINISHED
                              |  `-> STALLED -^ (a spare joins)
                              `-> HALTED
"""

from __future__ import annotations

from deadpool.core.membership_types import (
    Acked,
    Cause,
    CheckpointFound,
    Effect,
    End,
    Event,
    FaultReported,
    Fence,
    Finished,
    LeaderElected,
    LeaseExpired,
    Limits,
    MemberJoined,
    PublishView,
    SilenceConfirmed,
    State,
    StoreReturned,
    Tick,
)

__all__ = [
    "Acked",
    "Cause",
    "CheckpointFound",
    "Effect",
    "End",
    "Event",
    "FaultReported",
    "Fence",
    "Finished",
    "LeaderElected",
    "LeaseExpired",
    "Limits",
    "MemberJoined",
    "PublishView",
    "SilenceConfirmed",
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
    - FORMING (generation g): start all workers afresh, build, take snapshot 0, ack FORMING when it is complete
      on owner and holder for all own ranks. With `source` CHECKPOINT, load `rollback` first. Any fault leads to
      FORMING in generation g + 1: all workers start again.
    - ABORTING (g + 1): `slots` already names the replacements, so they can start to build (`joining`). Members of
      `slots` and `leaving` abort, then ack ABORTING with their final inventory, the groups of their layouts and
      the ranks whose worker is gone (`lost_ranks`). Joining members ack at once with what they have, mostly
      nothing; they are waited for only if without them nothing is live.
    - STALLED (same generation): `rollback` is fixed, a slot is vacant (""). Workers wait in `wrap`; agents may
      write a checkpoint of `rollback`. With `rollback` None it stands for a FORMING that lacks a host: stop the
      workers and wait.
    - RESTORING (same generation): every slot is filled, `rollback` and `source` are fixed. Fetch, rebuild,
      restore, then ack RESTORING. A slot whose worker is gone and that kept its member starts a new worker.
    - RUNNING (same generation): resume behind `rollback`. Members in `leaving` until now are fenced.
    - FINISHED and HALTED: end with `exit_code`.

    Events and acks of another generation or phase, repeated or unknown ones change nothing.

    Returns:
        The new state and what is to be done, in order.
    """
    raise NotImplementedError
