"""How an agent comes to its end: the job's last View, a signal, or its own replacement."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from deadpool.core.types import MemberId, Name, Phase, View
from deadpool.errors import ExitCode
from deadpool.events import EventLog
from deadpool.membership.lease import LeaseKeeper
from deadpool.runtime.checkpointing import CheckpointTier
from deadpool.runtime.cut_off import Stranded
from deadpool.runtime.result import write_result
from deadpool.runtime.workforce import Worker, WorkerState, Workforce

STORE_LIMIT_S = 300.0  # without etcd during a recovery


class AgentEnd(Exception):
    """Unwinds the main loop: this agent is done."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Replaced(Exception):
    """This incarnation was replaced; its host may come back as a new one.

    Attributes:
        is_awaited: a slot is vacant: the job waits for a host.
    """

    def __init__(self, why: str, *, is_awaited: bool) -> None:
        super().__init__(why)
        self.is_awaited = is_awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingCallbacks:
    """What the end needs to know, and whom it tells."""

    pid_of: Callable[[MemberId], int | None]
    protected: Callable[[], Name | None]
    job_view: Callable[[], View | None]  # the newest View that this host has seen
    ranks: Callable[[], range]  # of this host's slot; empty for a spare
    needs_view: Callable[[], bool]  # nothing happens before another View
    unheard: Callable[[], frozenset[MemberId]]  # members that are gone, or silent
    begun: Callable[[], None]  # the end has begun: hosts that leave are no news
    summarise: Callable[[], None]


class Ending:
    """The end of one agent, on its main thread.

    Args:
        run_dir: folder of the run.
        workforce: workers of this host.
        log: event log.
        callbacks: see EndingCallbacks.
        grace_s: how long it may take, from SIGTERM on, to make the last protected step durable.
    """

    def __init__(
        self,
        run_dir: Path,
        workforce: Workforce,
        log: EventLog,
        callbacks: EndingCallbacks,
        grace_s: float,
    ) -> None:
        self.view: View | None = None  # the last one
        self.signal = 0
        self._flush_by_s = 0.0
        self._flush_from: Name | None = None  # this step or a newer one is to be durable
        self._has_lease = True
        self._leaving: AgentEnd | None = None  # once what can be is durable
        self._stranded = Stranded(STORE_LIMIT_S)
        self._run_dir = run_dir
        self._workforce = workforce
        self._log = log
        self._callbacks = callbacks
        self._grace_s = grace_s
        self._codes: dict[int, int] = {}

    @property
    def is_flushing(self) -> bool:
        """This host leaves; the last protected step is being made durable."""
        return self._flush_by_s > 0.0

    def on_view(self, view: View) -> None:
        """FINISHED or HALTED."""
        if self.view is not None:
            return
        self.view = view
        self._callbacks.begun()
        pids = [self._callbacks.pid_of(member) for member in view.slots]
        final = [pid for pid in pids if pid is not None]
        self._log.note(partial(write_result, self._run_dir, view, final))
        if view.phase is Phase.FINISHED:
            self._workforce.finish(view.generation)
        else:
            self._workforce.exit_all(view.exit_code or int(ExitCode.USER_ERROR), view.reason)

    def is_of_job(self) -> bool:
        """Whether the job ends with this host, if it is the last: not if it was replaced, or failed alone.

        Before the first View others may still load, and register later: what is here is theirs.
        """
        return self.view is not None or (bool(self.signal) and self._callbacks.job_view() is not None)

    def give_up(self, why: str) -> None:
        """This host is of no use to the job."""
        self._log.emit("agent.failed", exit_code=int(ExitCode.USER_ERROR), reason=why)
        self._callbacks.summarise()
        raise AgentEnd(int(ExitCode.USER_ERROR), why)

    def not_written(self, what: str, error: Exception) -> None:
        """A record could not be written, for a reason that trying again does not mend."""
        self.give_up(f"{what} could not be written: {error!r}")

    def worker_ended(self, worker: Worker, code: int) -> None:
        self._codes[worker.rank] = code

    def check(self) -> None:
        """Raise AgentEnd once nothing is left to wait for. Scripts may go on after `wrap`."""
        view = self.view
        if view is None:
            return
        if view.phase is Phase.FINISHED and any(
            worker.state is not WorkerState.GONE for worker in self._workforce.workers
        ):
            return
        failed = any(self._codes.values())
        code = view.exit_code or (int(ExitCode.USER_ERROR) if failed else 0)
        self._callbacks.summarise()
        self._log.emit("run.finished", generation=view.generation, exit_code=code, reason=view.reason)
        raise AgentEnd(code, view.reason)

    def check_store(self, view: View | None, lease: LeaseKeeper | None) -> None:
        """Every tick: leave, with what can be made durable, when the control plane was needed for too long.

        Args:
            view: the one that this host obeys.
            lease: of this host; None before it has one.
        """
        is_reached = lease is not None and lease.reaches_store
        self._has_lease = lease is not None and not lease.is_overdue
        needs_view = view is not None and view.phase is Phase.RUNNING and self._callbacks.needs_view()
        steps = [worker.finished_now() for worker in self._workforce.workers]
        if self._stranded.judge(view, is_reached, needs_view, steps, time.monotonic()) and not self._leaving:
            why = f"no control plane for {STORE_LIMIT_S:g} s, and the job needs it to form or to recover"
            code = int(ExitCode.CONTROL_PLANE_UNREACHABLE)
            self._log.emit("agent.failed", exit_code=code, reason=why)
            self._leaving = AgentEnd(code, why)

    def check_signal(self, checkpoints: CheckpointTier | None) -> None:
        """Ctrl-C ends at once; who leaves otherwise first makes the last protected step durable.

        Args:
            checkpoints: None before this host has joined the job: it has nothing to make durable.
        """
        if self.signal == signal.SIGINT:
            self._leave(AgentEnd(int(ExitCode.INTERRUPTED), "Ctrl-C"), checkpoints)
        if self.signal and not self._leaving:  # SIGTERM, as before pre-emption
            self._leaving = AgentEnd(int(ExitCode.TERMINATED), "SIGTERM")
        if self._leaving is None:
            return
        if checkpoints is None:
            raise self._leaving
        now_s = time.monotonic()
        if not self._flush_by_s:
            self._flush_by_s = now_s + self._grace_s
            self._callbacks.begun()
        checkpoints.keeps_all = not self._has_lease  # the folder may be another's by now
        self._flush(checkpoints)
        if now_s > self._flush_by_s or self._is_flushed(checkpoints):
            self._leave(self._leaving, checkpoints)

    def _leave(self, end: AgentEnd, checkpoints: CheckpointTier | None) -> NoReturn:
        if checkpoints is not None:  # a host that has not joined the job has nothing to sum up
            self._callbacks.summarise()
        raise end

    def may_write(self, lease: LeaseKeeper | None, peers: tuple[bool, bool]) -> bool:
        """Whether this host may write to a checkpoint: it has not been replaced. Any thread.

        A host that leaves may also write where its lease has run out and no peer reaches etcd: nobody can be
        replaced then, and it is the last chance. Should another part of the job reach etcd unheard, or a job
        that was started in its place, it finds one more checkpoint, of a step that was committed: one counts
        only if every rank is in it. Nothing is deleted without a lease.

        Args:
            lease: of this host; None before it has one.
            peers: (some peer was heard lately, some peer that was heard lately reaches etcd).
        """
        is_heard, peer_reaches = peers
        is_stranded = self.is_flushing and is_heard and not peer_reaches
        return lease is not None and (not lease.is_overdue or is_stranded)

    def completer(self, leader: MemberId) -> MemberId:
        """Who completes checkpoints: the leader, or if a job ends without one, the first host that lives."""
        view = self._callbacks.job_view()
        if not self.is_flushing or view is None:
            return leader
        unheard = self._callbacks.unheard()
        return next((member for member in (leader, *view.slots) if member and member not in unheard), leader)

    def _flush(self, checkpoints: CheckpointTier) -> None:
        """Hosts hear of a commit at different times: the newest is there on all. Each write is begun once."""
        protected = self._callbacks.protected() or self._restored()
        if protected is None:
            return
        self._flush_from = self._flush_from or protected
        ranks, view = self._callbacks.ranks(), self._callbacks.job_view()
        checkpoints.save(ranks, protected)
        # Who has left because all is durable is no orphan.
        if view is not None and ranks and not checkpoints.is_durable(self._flush_from):
            unheard = self._callbacks.unheard()
            slots = [slot for slot, member in enumerate(view.slots) if member in unheard]
            orphans = [rank for slot in slots for rank in view.ranks_of_slot(slot)]
            checkpoints.save_held(orphans, ranks, protected)

    def _is_flushed(self, checkpoints: CheckpointTier) -> bool:
        if self._flush_from is None:  # nothing was ever committed; in a recovery, that is not known yet
            view = self._callbacks.job_view()
            return view is None or view.phase not in (Phase.ABORTING, Phase.RESTORING)
        return checkpoints.is_durable(self._flush_from)

    def _restored(self) -> Name | None:
        """What the last recovery went back to: every owner has it, also while no holder has it again."""
        view = self._callbacks.job_view()
        return view.rollback if view is not None and view.phase in (Phase.RUNNING, Phase.STALLED) else None
