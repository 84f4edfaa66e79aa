"""The workers of one host: their states, their limits, and what the agent is told about them.

Runs on the agent's main thread only; threads of the workers' channels hand over through `post`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from deadpool.config import Config
from deadpool.liveness.process import ProcessWatch
from deadpool.runtime.messages import (
    Abort,
    AgentToWorker,
    Assign,
    Exit,
    Finish,
    Ready,
    Rehearsed,
    Restore,
    Restored,
    RestoreFailed,
    Run,
    Unwound,
    WorkerDone,
    WorkerToAgent,
)
from deadpool.runtime.processes import WorkerHandle


class WorkerState(Enum):
    """Where a worker stands, as its agent knows."""

    STARTING = "starting"
    PARKED = "parked"
    REHEARSING = "rehearsing"
    BUILDING = "building"  # the script runs up to `wrap`
    ATTACHED = "attached"  # `wrap` was called; the segment is handed over
    RUNNING = "running"
    ABORTING = "aborting"  # told to close and unwind
    QUIET = "quiet"  # unwound, captures drained, communicators down
    RESTORING = "restoring"
    RESTORED = "restored"
    DONE = "done"  # finished its last step
    GONE = "gone"


EXIT_GRACE_S = 1.0

_HAS_COMMUNICATORS = {
    WorkerState.RUNNING,
    WorkerState.ABORTING,
    WorkerState.QUIET,
    WorkerState.RESTORING,
    WorkerState.RESTORED,
    WorkerState.DONE,
    WorkerState.ATTACHED,
}


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker and what is expected of it."""

    handle: WorkerHandle
    state: WorkerState = WorkerState.STARTING
    since_s: float = field(default_factory=time.monotonic)
    close_deadline_s: float = 0.0  # 0: not waiting
    unwind_deadline_s: float = 0.0
    reap_deadline_s: float = 0.0
    is_stuck: bool = False  # killed, and the kernel does not let it end
    generation: int = 0
    finished_step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    killed_for: str = ""  # why the agent itself killed it
    is_rehearsed: bool = False
    groups: dict[int, str] = field(default_factory=dict)  # hash of a group's name -> words for people

    @property
    def rank(self) -> int:
        return self.handle.rank

    def finished_now(self) -> int:
        """Newest finished step, from the worker's page."""
        if self.state is WorkerState.GONE:
            return 0
        try:
            return self.handle.page.sample().finished_step
        except ValueError:
            return 0  # asked from another thread, and unmapped meanwhile

    def enter(self, state: WorkerState) -> None:
        self.state = state
        self.since_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkforceCallbacks:
    """What the agent is told; all on its main thread."""

    message: Callable[[Worker, WorkerToAgent], None]  # everything the workforce does not handle itself
    parked: Callable[[Worker], None]
    lost: Callable[[Worker, str], None]  # an assigned worker is gone, with the cause in words
    unreaped: Callable[[Worker], None]  # killed, and still there: the host is bad
    ended: Callable[[Worker, int], None]  # an assigned worker ended after FINISHED, with its code


class Workforce:
    """The workers of this host.

    Args:
        config: configuration of the job.
        run_dir: folder of the run.
        post: runs a function on the agent's main thread.
        callbacks: see WorkforceCallbacks.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        post: Callable[..., None],
        callbacks: WorkforceCallbacks,
    ) -> None:
        self.workers: list[Worker] = []
        self.versions: dict[str, str] = {}  # of the packages that must agree across hosts
        self.build_s = 0.0  # what the slowest worker took from its assignment to `wrap`
        self.ready_s = 0.0  # what the last worker took from its start to parked
        self._config = config
        self._limits = config.communicator
        self._run_dir = run_dir
        self._post = post
        self._callbacks = callbacks
        self._watch = ProcessWatch()
        self._finishing = False
        self._exiting = False

    # ---- processes -----------------------------------------------------------------------------------

    def start(self, count: int) -> None:
        for local_rank in range(count):
            self.workers.append(self._spawn(local_rank))

    def restart_all(self) -> None:
        """Fresh processes for every worker that has run anything (FORMING again, or fenced)."""
        for index, worker in enumerate(self.workers):
            if worker.state not in (WorkerState.STARTING, WorkerState.PARKED):
                self.replace(index)

    def replace(self, local_rank: int) -> Worker:
        """A fresh worker in the place of a lost one."""
        old = self.workers[local_rank]
        if old.state is not WorkerState.GONE:
            self._kill_now(old)
        self.workers[local_rank] = self._spawn(local_rank)
        return self.workers[local_rank]

    def replace_lost(self) -> None:
        """A fresh worker in the place of each lost one."""
        for worker in list(self.workers):
            if worker.state is WorkerState.GONE:
                self.replace(worker.handle.local_rank)

    def stop_all(self, timeout_s: float) -> None:
        """Kill and reap everything, within the bound. Who was told to end has a moment to do so itself."""
        grace_s = time.monotonic() + EXIT_GRACE_S
        while self._exiting and time.monotonic() < grace_s:
            if all(worker.handle.process.poll() is not None for worker in self.workers):
                break
            time.sleep(0.01)
        for worker in self.workers:
            worker.killed_for = worker.killed_for or "the agent ends"
            worker.handle.kill()
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            worker.handle.reap(max(0.1, deadline - time.monotonic()))
            worker.state = WorkerState.GONE
        self._watch.close()

    def exit_all(self, code: int, reason: str) -> None:
        """Tell every worker to end at once; `stop_all` makes sure of it."""
        self._exiting = True
        for worker in self.workers:
            if worker.state is not WorkerState.GONE:
                worker.killed_for = reason
                worker.handle.send(Exit(code=code, reason=reason))

    def _spawn(self, local_rank: int) -> Worker:
        handle = WorkerHandle(
            local_rank,
            self._config,
            self._run_dir,
            lambda handle, message: self._post(self._on_message, handle, message),
            lambda handle, generation: self._post(self._on_closed, handle, generation),
        )
        worker = Worker(handle=handle)
        self._watch.add(handle.pid, lambda pid, status: self._post(self._on_exit, worker, status))
        return worker

    def _kill_now(self, worker: Worker) -> None:
        worker.killed_for = worker.killed_for or "replaced"
        worker.state = WorkerState.GONE
        worker.handle.kill()
        if not worker.handle.reap(self._limits.reap_timeout_s):
            worker.is_stuck = True
            self._callbacks.unreaped(worker)

    # ---- commands ------------------------------------------------------------------------------------

    def assign(self, worker: Worker, assignment: Assign) -> None:
        worker.generation = assignment.generation
        if assignment.rehearse:
            worker.enter(WorkerState.REHEARSING)
        else:
            worker.handle.rank = assignment.rank
            worker.enter(WorkerState.BUILDING)
        worker.handle.send(assignment)

    def attached(self, worker: Worker) -> None:
        """The script of a worker has reached `wrap`."""
        self.build_s = max(self.build_s, time.monotonic() - worker.since_s)
        worker.enter(WorkerState.ATTACHED)

    def run(self, generation: int) -> None:
        for worker in self._assigned():
            worker.generation = generation
            worker.enter(WorkerState.RUNNING)
            worker.handle.send(Run(generation=generation))

    def abort(self, generation: int, reason: str, *, is_leaving: bool) -> None:
        """Close handles of older generations, natively, and let the workers unwind.

        Called again for a newer generation it restarts the limits of those that are not quiet yet.

        Args:
            generation: the one that begins.
            reason: for the workers' messages.
            is_leaving: this host was replaced: nobody goes on from where its workers unwind to, so others
                wait for them only as long as a capture under way may need.
        """
        unwind_s = self._limits.abort_timeout_s + self._limits.unwind_timeout_s
        if is_leaving:
            unwind_s = self._limits.close_timeout_s
        now_s = time.monotonic()
        for worker in self._assigned():
            if worker.state not in _HAS_COMMUNICATORS:
                continue  # still builds: no peers, nothing to close
            worker.handle.close_handles(generation - 1)
            worker.handle.send(Abort(generation=generation, reason=reason))
            worker.generation = generation
            worker.enter(WorkerState.ABORTING)
            worker.close_deadline_s = now_s + self._limits.close_timeout_s
            worker.unwind_deadline_s = now_s + self._limits.close_timeout_s + unwind_s

    def kill_rank(self, rank: int, why: str) -> None:
        """Kill the worker of a rank; its copies stay."""
        worker = self.by_rank(rank)
        if worker is not None:
            self._kill_for(worker, why)

    def restore(self, worker: Worker, message: Restore) -> None:
        worker.generation = message.generation
        worker.enter(WorkerState.RESTORING)
        worker.handle.send(message)

    def finish(self, generation: int) -> None:
        self._finishing = True
        for worker in self.workers:
            if worker.state is WorkerState.GONE:
                continue
            if worker.handle.is_parked:
                worker.killed_for = "training is over"
                worker.handle.kill()
            else:
                worker.handle.send(Finish(generation=generation))

    def tick(self) -> None:
        """Limits of DESIGN section 7: a worker that misses one is killed; its copies stay."""
        now_s = time.monotonic()
        for worker in self.workers:
            if (
                worker.reap_deadline_s
                and now_s > worker.reap_deadline_s
                and worker.state is not WorkerState.GONE
            ):
                worker.reap_deadline_s = 0.0
                worker.is_stuck = True
                self._callbacks.unreaped(worker)
            if worker.state is not WorkerState.ABORTING:
                continue
            if worker.close_deadline_s and now_s > worker.close_deadline_s:
                limit = f"{self._limits.close_timeout_s:g} s (close_timeout_s)"
                self._kill_for(worker, f"did not close its handles within {limit}")
            elif worker.unwind_deadline_s and now_s > worker.unwind_deadline_s:
                self._kill_for(worker, "did not unwind to wrap in time (unwind_timeout_s)")

    # ---- questions -----------------------------------------------------------------------------------

    def is_lost(self, rank: int) -> bool:
        """Whether nobody goes on as this rank from where an abort left it."""
        worker = self.by_rank(rank)
        return worker is None or worker.is_stuck or worker.state is WorkerState.BUILDING

    def tell(self, rank: int, message: AgentToWorker) -> None:
        """Send a message to the worker of a rank, if there is one."""
        worker = self.by_rank(rank)
        if worker is not None:
            worker.handle.send(message)

    def finished_step(self, rank: int) -> int:
        """Newest finished step of a rank."""
        worker = self.by_rank(rank)
        return worker.finished_now() if worker is not None else 0

    def by_rank(self, rank: int) -> Worker | None:
        for worker in self.workers:
            if worker.rank == rank and worker.state is not WorkerState.GONE:
                return worker
        return None

    def all_in(self, ranks: Iterable[int], states: set[WorkerState]) -> bool:
        workers = [self.by_rank(rank) for rank in ranks]
        return all(worker is not None and worker.state in states for worker in workers)

    def _assigned(self) -> list[Worker]:
        return [
            worker
            for worker in self.workers
            if not worker.handle.is_parked and worker.state is not WorkerState.GONE
        ]

    # ---- what workers say ----------------------------------------------------------------------------

    def _on_message(self, handle: WorkerHandle, message: WorkerToAgent) -> None:
        worker = next((each for each in self.workers if each.handle is handle), None)
        if worker is None or worker.state is WorkerState.GONE:
            return
        match message:
            case Ready():
                self.versions = dict(message.versions)
                self.ready_s = message.seconds
                worker.enter(WorkerState.PARKED)
                self._callbacks.parked(worker)
            case Rehearsed():
                worker.enter(WorkerState.PARKED)
                self._callbacks.message(worker, message)
                self._callbacks.parked(worker)
            case Unwound(generation=generation):
                if generation == worker.generation and worker.state is WorkerState.ABORTING:
                    worker.finished_step = message.finished_step
                    worker.close_deadline_s = worker.unwind_deadline_s = 0.0
                    worker.enter(WorkerState.QUIET)
                    self._callbacks.message(worker, message)
            case Restored(generation=generation) | RestoreFailed(generation=generation):
                if generation == worker.generation and worker.state is WorkerState.RESTORING:
                    if isinstance(message, Restored):
                        worker.seconds = dict(message.seconds)
                        worker.enter(WorkerState.RESTORED)
                    self._callbacks.message(worker, message)
            case WorkerDone(generation=generation):
                if generation == worker.generation and worker.state is WorkerState.RUNNING:
                    worker.enter(WorkerState.DONE)
                    self._callbacks.message(worker, message)
            case _:
                self._callbacks.message(worker, message)

    def _on_closed(self, handle: WorkerHandle, generation: int) -> None:
        for worker in self.workers:
            if worker.handle is handle and generation >= worker.generation - 1:
                worker.close_deadline_s = 0.0

    def _on_exit(self, worker: Worker, status: Any) -> None:
        if worker.state is WorkerState.GONE:
            return
        was_parked = worker.handle.is_parked
        worker.finished_step = worker.finished_now()
        worker.state = WorkerState.GONE
        worker.handle.reap(self._limits.reap_timeout_s)
        code = worker.handle.process.returncode
        if self._finishing:
            if not was_parked:
                self._callbacks.ended(worker, code)
            return
        cause = worker.killed_for or describe_exit(code)
        self._callbacks.lost(worker, cause)

    def _kill_for(self, worker: Worker, why: str) -> None:
        worker.killed_for = why
        worker.close_deadline_s = worker.unwind_deadline_s = 0.0
        worker.reap_deadline_s = time.monotonic() + self._limits.reap_timeout_s
        worker.handle.kill()


def describe_exit(code: int | None) -> str:
    """A process' end in words."""
    if code is None:
        return "ended in a way its agent could not see"
    if code < 0:
        return f"killed by signal {-code}"
    return f"exited with code {code}"
