"""Every message that crosses a process boundary inside a job, except replica streams and etcd records.

Worker <-> agent: a unix socket pair, made by the agent before it starts the worker.
Agent <-> agent: TCP control connections. Every one of those carries the generation it was sent in.
"""

from __future__ import annotations

import msgspec

from deadpool.core.types import Name
from deadpool.store.checkpoint import Shard


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages; the tag is the class name."""


# ---- worker -> agent ---------------------------------------------------------------------------------


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """Imports are done and the self-test passed; the worker is parked."""

    pid: int
    versions: dict[str, str]
    seconds: float


class Attach(Message, frozen=True, kw_only=True, tag=True):
    """`wrap` was called: what this rank's segment must hold."""

    generation: int
    once: bytes  # OnceArea: constructor record and layout


class Captured(Message, frozen=True, kw_only=True, tag=True):
    """A named step is complete in the rank's own bank."""

    name: Name
    bank: int
    blob_len: int


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """This rank will never capture `step`."""

    generation: int
    step: int
    at_step: int
    why: str
    is_lasting: bool = False  # nor any later step, unless the script mends it


class Rehearsed(Message, frozen=True, kw_only=True, tag=True):
    """The throw-away build of a parked spare ended."""

    seconds: float
    problem: str = ""


class Raised(Message, frozen=True, kw_only=True, tag=True):
    """An exception left `train` while no handle had been closed in this generation."""

    generation: int
    step: int
    collective: bool  # it looks like a failed collective
    bad_input: bool = False  # the arguments of `wrap` or the configuration are at fault
    text: str  # last line of the traceback
    traceback: str


class Unwound(Message, frozen=True, kw_only=True, tag=True):
    """The worker is back in `wrap`, its captures are drained, its communicators are down."""

    generation: int  # the generation that was closed
    finished_step: int


class Restored(Message, frozen=True, kw_only=True, tag=True):
    """The rank stands at the rollback step of `generation` with live communicators."""

    generation: int
    seconds: dict[str, float]


class RestoreFailed(Message, frozen=True, kw_only=True, tag=True):
    """The communicators of `generation` were not built, or the state could not be restored."""

    generation: int
    why: str
    unreached: tuple[int, ...] = ()  # ranks that did not come, or whose host does not answer this one


class FirstStep(Message, frozen=True, kw_only=True, tag=True):
    """The first step after a recovery is finished."""

    generation: int
    step: int
    seconds: float


class WorkerDone(Message, frozen=True, kw_only=True, tag=True):
    """This rank finished its last step; it takes part in recoveries until told to finish."""

    generation: int
    step: int


class Groups(Message, frozen=True, kw_only=True, tag=True):
    """The constructor phase ended: how to call the groups that the script made."""

    names: dict[str, str]  # name of the handle -> words for people


class Note(Message, frozen=True, kw_only=True, tag=True):
    """A line for the event log."""

    event: str
    fields: dict[str, str | int | float]


# ---- agent -> worker ---------------------------------------------------------------------------------


class Assign(Message, frozen=True, kw_only=True, tag=True):
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


class SegmentReply(Message, frozen=True, kw_only=True, tag=True):
    """Answer to Attach; the descriptor of the rank's segment travels with it."""

    generation: int
    load: Name | None = None  # bank 0 holds this checkpoint: begin from it


class CaptureStep(Message, frozen=True, kw_only=True, tag=True):
    """Capture `step` into `bank` when its boundary is reached. Replaces what was told before."""

    generation: int
    step: int
    bank: int
    committed_step: int  # every rank is protected up to this step; -1: nothing is


class WithdrawStep(Message, frozen=True, kw_only=True, tag=True):
    """Do not capture `step` if it has not begun."""

    generation: int
    step: int


class Run(Message, frozen=True, kw_only=True, tag=True):
    """The View says RUNNING in this generation: enter `train`."""

    generation: int


class Abort(Message, frozen=True, kw_only=True, tag=True):
    """The handles were closed: unwind. The close itself goes over the native channel."""

    generation: int  # the new generation
    reason: str


class Restore(Message, frozen=True, kw_only=True, tag=True):
    """Rebuild the communicators of `generation` and restore `name` from `bank`."""

    generation: int
    name: Name
    bank: int
    rendezvous: tuple[str, int]
    timeout_s: float  # for the rebuild, the other hosts' fetching and building included
    peers: tuple[tuple[int, str, int], ...] = ()  # (first rank, address, control port) of every other host


class Finish(Message, frozen=True, kw_only=True, tag=True):
    """All ranks finished; `wrap` returns."""

    generation: int


class Exit(Message, frozen=True, kw_only=True, tag=True):
    """End at once, writing nothing."""

    code: int
    reason: str


# ---- agent <-> agent ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First message on a control connection."""

    member: str
    token: str
    generation: int


class Heartbeat(Message, frozen=True, kw_only=True, tag=True):
    """I am here, this is the View I obey, and whether I reach the control plane."""

    member: str
    generation: int
    view_revision: int
    reaches_store: bool


class Silent(Message, frozen=True, kw_only=True, tag=True):
    """All that `observer` does not hear now; it replaces what it said before, and is said again."""

    observer: str
    generation: int
    silent: tuple[str, ...] = ()  # nothing came from them for silence_dead_s
    gone: tuple[str, ...] = ()  # their own hosts say that these processes do not exist


class Relay(Message, frozen=True, kw_only=True, tag=True):
    """A commit message (Naming, Report, BanksReport), encoded by the core's types."""

    sender: str
    generation: int
    kind: str
    body: bytes


class Stalled(Message, frozen=True, kw_only=True, tag=True):
    """A wait took long, or the leader asked: what this host's workers say."""

    member: str
    generation: int
    ranks: list[int]
    tick_frozen: list[bool]
    finished_step: list[int]
    is_quiet: list[bool]
    handles: list[list[tuple[int, int, int, int]]]
    names: dict[int, str]  # of groups in which a rank waits
    is_late: bool  # no step was finished for the progress timeout


class ShardWritten(Message, frozen=True, kw_only=True, tag=True):
    """A shard of a checkpoint is durable; the leader writes the manifest once all are."""

    generation: int
    name: Name
    shard: Shard


class StallQuery(Message, frozen=True, kw_only=True, tag=True):
    """The leader asks every host for a Stalled report."""

    generation: int


class StatusRequest(Message, frozen=True, kw_only=True, tag=True):
    """`deadpool status` asks; the first and only message of its connection."""

    token: str


class StatusReply(Message, frozen=True, kw_only=True, tag=True):
    """The answer to StatusRequest."""

    body: bytes  # msgpack of a dict


WorkerToAgent = (
    Ready
    | Attach
    | Captured
    | Refused
    | Rehearsed
    | Raised
    | Unwound
    | Restored
    | RestoreFailed
    | FirstStep
    | WorkerDone
    | Note
    | Groups
)
AgentToWorker = Assign | SegmentReply | CaptureStep | WithdrawStep | Run | Abort | Restore | Finish | Exit
Control = (
    Hello | Heartbeat | Silent | Relay | Stalled | ShardWritten | StallQuery | StatusRequest | StatusReply
)
