"""Every message that crosses a process boundary inside a job, except replica streams and etcd records.

Worker <-> agent: a unix socket pair, made by the agent before it starts the worker.
Agent <-> agent: TCP control connections. Every one of those carries the generation it was sent in.
"""

from __future__ import annotations

import msgspec

from deadpool.core.types import Name


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag is the class name."""


# ---- worker -> agent ---------------------------------------------------------------------------------


class Ready(Message):
    """Imports are done and the self-test passed; the worker is parked."""

    pid: int
    versions: dict[str, str]
    seconds: float


class Joined(Message):
    """`deadpool.init()` returned in the worker."""

    generation: int


class Attach(Message):
    """`wrap` was called: sizes of the segment this rank needs, and what the layout says."""

    generation: int
    blob_capacity: int
    unique_bytes: int
    replicated_bytes: int
    once: bytes  # constructor record and layout, written once
    layout_hash: str
    groups: list[list[int]]  # ranks of each replicated group


class Captured(Message):
    """A named step is complete in the rank's own bank."""

    name: Name
    bank: int
    blob_len: int


class Refused(Message):
    """This rank will never capture `step` under this naming."""

    generation: int
    term: int
    step: int
    at_step: int
    why: str


class Rehearsed(Message):
    """The throw-away build of a parked spare ended."""

    seconds: float
    problem: str = ""


class Raised(Message):
    """An exception left `train` while no handle had been closed in this generation."""

    generation: int
    step: int
    collective: bool  # it looks like a failed collective
    text: str  # last line of the traceback
    traceback: str


class Unwound(Message):
    """The worker is back in `wrap`, its captures are drained, its communicators are down."""

    generation: int  # the generation that was closed
    finished_step: int


class Restored(Message):
    """The rank stands at the rollback step of `generation` with live communicators."""

    generation: int
    seconds: dict[str, float]


class RestoreFailed(Message):
    generation: int
    why: str


class FirstStep(Message):
    """The first step after a recovery is finished."""

    generation: int
    step: int
    seconds: float


class WorkerDone(Message):
    """This rank finished its last step; it takes part in recoveries until told to finish."""

    generation: int
    step: int


class Note(Message):
    """A line for the event log."""

    event: str
    fields: dict[str, str | int | float]


# ---- agent -> worker ---------------------------------------------------------------------------------


class Assign(Message):
    """Run the script as this rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    generation: int
    rendezvous: tuple[str, int]
    token: str
    member: str
    record: bytes = b""  # constructor record to replay; empty: record the first start
    rehearse: bool = False  # throw the build away at `wrap`


class Segment(Message):
    """Answer to Attach; the descriptor travels with it."""

    blob_capacity: int
    unique_bytes: int
    replicated_bytes: int
    once_bytes: int


class CaptureStep(Message):
    """Capture `step` (the naming of the leader) into `bank` when its boundary is reached."""

    generation: int
    term: int
    step: int
    bank: int


class DropNamings(Message):
    """Forget every naming of an older term or generation that is not yet captured."""

    generation: int
    term: int


class Run(Message):
    """The View says RUNNING in this generation: enter `train`."""

    generation: int


class Abort(Message):
    """The handles were closed: unwind. (The close itself goes over the native channel.)"""

    generation: int  # the new generation
    reason: str


class Restore(Message):
    """Rebuild the communicators of `generation` and restore `name` from `bank`."""

    generation: int
    name: Name
    bank: int
    rendezvous: tuple[str, int]


class Finish(Message):
    """All ranks finished; `wrap` returns."""

    generation: int


class Exit(Message):
    """End at once, writing nothing."""

    code: int
    reason: str


# ---- agent <-> agent ---------------------------------------------------------------------------------


class Hello(Message):
    """First message on a control connection."""

    member: str
    token: str
    generation: int


class Heartbeat(Message):
    member: str
    generation: int
    view_revision: int
    reaches_store: bool


class Silent(Message):
    """`observer` has not heard `member` for silence_dead_s, or its host says the process is gone."""

    observer: str
    member: str
    generation: int
    gone: bool
    back: bool = False  # it was heard again: the observation is withdrawn


class Relay(Message):
    """A commit message (Naming, Report, BanksReport), encoded by the core's types."""

    sender: str
    generation: int
    kind: str
    body: bytes


class Stalled(Message):
    """No step finished for the progress timeout: what this host's workers say."""

    member: str
    generation: int
    ranks: list[int]
    tick_frozen: list[bool]
    finished_step: list[int]
    handles: list[list[tuple[int, int, int]]]


class StatusRequest(Message):
    token: str


class StatusReply(Message):
    body: bytes  # msgpack of a dict


WorkerToAgent = (
    Ready | Joined | Attach | Captured | Refused | Rehearsed | Raised | Unwound | Restored | RestoreFailed
    | FirstStep | WorkerDone | Note
)
AgentToWorker = (
    Assign | Segment | CaptureStep | DropNamings | Run | Abort | Restore | Finish | Exit
)
Control = Hello | Heartbeat | Silent | Relay | Stalled | StatusRequest | StatusReply
