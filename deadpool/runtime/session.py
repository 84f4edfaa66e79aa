"""One rank's life inside the script: init, wrap, boundaries, abort, restore, finish.

Everything here runs on the training thread, except `_refuse_late` (message thread) and the capture's
completion (capture thread). The order of an abort is DESIGN section 6: the native listener closes the
handles, freezes and takes the communicators down; this module unwinds, drains the captures and says so.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from deadpool.communicator import extension
from deadpool.communicator.groups import Communicators
from deadpool.communicator.rendezvous import RendezvousStore
from deadpool.core.types import Name
from deadpool.errors import (
    CollectiveAborted,
    DeviceLost,
    Fenced,
    IntegrationError,
    LayoutMismatch,
    RebuildTimeout,
)
from deadpool.liveness.progress import WorkerPage
from deadpool.liveness.reach import find_unreachable
from deadpool.runtime.device import Cpu, come_to_rest, find_device
from deadpool.runtime.injector import Injector
from deadpool.runtime.messages import (
    Abort,
    Assign,
    Attach,
    Captured,
    CaptureStep,
    Finish,
    FirstStep,
    Groups,
    Note,
    Raised,
    Refused,
    Restore,
    Restored,
    RestoreFailed,
    Run,
    SegmentReply,
    Unwound,
    WorkerDone,
)
from deadpool.runtime.once import OnceArea
from deadpool.runtime.quiet import QuietSection
from deadpool.runtime.records import StepRecords, digest
from deadpool.runtime.result import write_json
from deadpool.runtime.state import StateKeeper
from deadpool.runtime.worker import BuildDiscarded, WorkerProcess, current_worker
from deadpool.store.segment import Segment

T = TypeVar("T")

STEPS_REMEMBERED = 10_000  # step times behind the percentiles of the report
DONE_STEP = 1 << 62  # boundary after the last step: every later naming is refused

_session: TrainingSession | None = None


def session() -> TrainingSession | None:
    """The session that `deadpool.init()` opened, if any."""
    return _session


def open_session(timeout_s: float | None) -> TrainingSession | None:
    """Join the job; None when the script runs without `deadpool run`."""
    global _session
    worker = current_worker()
    if worker is None:
        return None
    if _session is not None:
        return _session
    assert worker.assignment is not None
    _session = TrainingSession(worker, worker.assignment, timeout_s)
    _session.join()
    return _session


def forget_session() -> None:
    """Throw the session away (after a throw-away build)."""
    global _session
    if _session is not None:
        _session.discard()
        _session = None


class TrainingSession:
    """The session of one rank."""

    def __init__(self, worker: WorkerProcess, assignment: Assign, timeout_s: float | None) -> None:
        self.worker = worker
        self.rank = assignment.rank
        self.world_size = assignment.world_size
        self.generation = assignment.generation
        self.step = 0  # newest finished step
        self.communicators = Communicators(
            job_id=worker.config.job.job_id,
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout_s=timeout_s or worker.config.communicator.collective_timeout_s,
            close_fd=worker.close_fd,
            page_fd=worker.page_fd,
        )
        self._assignment = assignment
        self._page = WorkerPage.attach(worker.page_fd)
        self._injector = Injector(worker, assignment.rank)
        self._records = StepRecords(self._record_dir(), assignment.rank)
        self._state: StateKeeper | None = None
        self._segment: Segment | None = None
        self._entered_s = 0.0  # when `train` was entered after a recovery; 0 once its first step is done
        self._began_step = 0
        self._step_started_ns = 0
        self._step_seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self.is_fresh = True  # nothing restored or captured yet: tensors are what the constructor left
        self._device = find_device()

    # ---- init ----------------------------------------------------------------------------------------

    @property
    def is_promoted(self) -> bool:
        """This process replays the constructor phase of the rank it takes over."""
        return bool(self._assignment.record)

    def join(self) -> None:
        """Make the default process group, recording or replaying the constructor phase."""
        communicators = self.communicators
        communicators.install()
        if self.rank == 0 and not self._assignment.rehearse:
            extension.say_if_foreign()
        if self.is_promoted:
            communicators.start_replay(OnceArea.decode(self._assignment.record).record)
            communicators.init_process_group(None)
        else:
            communicators.start_recording()
            timeout_s = self.worker.config.communicator.rebuild_timeout_s
            communicators.init_process_group(self._rendezvous(self._assignment.rendezvous, timeout_s))

    def discard(self) -> None:
        self.communicators.destroy_all()
        if self._state is not None:
            self._state.close()
        self._page.close()

    def _rendezvous(self, address: tuple[str, int], timeout_s: float) -> RendezvousStore:
        return RendezvousStore(
            address[0],
            address[1],
            token=self._assignment.token,
            generation=self.generation,
            timeout_s=timeout_s,
        )

    def _record_dir(self) -> Path | None:
        config = self.worker.config.run
        return Path(config.record_dir) if config.record_dir else None

    # ---- wrap ----------------------------------------------------------------------------------------

    def run(self, state: StateKeeper, enter: Callable[[], T]) -> T:
        """Attach `state`, then call `enter` until all ranks have finished; see `deadpool.wrap`."""
        self.attach(state, is_reentered=True)
        while True:
            try:
                self.check_open()
                result = enter()
                self.finish_together()
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                self.judge(error)
            else:
                self.leave()
                return result
            self.recover()

    def attach(self, state: StateKeeper, *, is_reentered: bool) -> None:
        """Close the layout, get the segment, and stand at a step from which training may go on.

        Args:
            state: training state.
            is_reentered: after a recovery the training code is entered from its top.
        """
        if self._assignment.rehearse:
            state.close()
            raise BuildDiscarded
        self._state = state
        if self.is_promoted:
            once = self._assignment.record
            self.communicators.finish_replay(state.live_tensors())
            state.adopt_layout(OnceArea.decode(once))
        else:
            record = self.communicators.finish_recording()
            once = state.settle_layout(record, self.world_size, self._assignment.local_world_size).encode()
        self.communicators.settle_groups(later_allowed=is_reentered)
        self.worker.send(Groups(names=self.communicators.describe_groups()))
        self.worker.send(Attach(generation=self.generation, once=once))
        reply = self._next_of(SegmentReply)
        self._segment = Segment.attach(self.worker.channel.take_fd(), prefault=not self.is_promoted)
        state.bind(
            self._segment,
            on_captured=self._on_captured,
            on_failed=self._on_capture_failed,
            on_began=self._on_began,
            frozen=self._is_frozen,
        )
        self._injector.bind(self, state)
        if self.is_promoted:
            self._restore_until_running()
            return
        self._write_initial_digests(state)
        if reply.load is None:
            state.capture(Name(step=0, generation=self.generation), bank=0)
            state.wait()
        else:
            self._begin_from(state, reply.load)
        if not self._await_running():
            raise Fenced("the job formed anew; this process ends")

    def _begin_from(self, state: StateKeeper, name: Name) -> None:
        """Bank 0 holds a checkpoint: it is this run's first snapshot."""
        state.restore(0, only_boundary=False, serve=self.communicators.serve_next)
        self.step = self._began_step = name.step
        self._page.restart(self.step, self.generation)
        self.worker.restart_boundaries(self.step)
        self.worker.send(Captured(name=name, bank=0, blob_len=0))

    def _write_initial_digests(self, state: StateKeeper) -> None:
        if self.worker.config.run.record_dir:
            write_json(
                self._digest_path("initial"), {name: digest(tensor) for name, tensor in state.named_tensors()}
            )

    def _digest_path(self, kind: str) -> Path:
        return self.worker.run_dir / "digests" / f"{kind}-{self.rank}.json"

    def sent_bytes(self, bank: int) -> int:
        """How much of a bank was sent to its holder."""
        return self._segment.bank_info(bank).sent_bytes if self._segment is not None else 0

    # ---- boundaries ----------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise CollectiveAborted if this generation was closed."""
        if self.communicators.closed_generation >= self.generation:
            raise CollectiveAborted(
                f"generation {self.generation} was closed at rank {self.rank}, step {self.step + 1}"
            )

    def begin_step(self) -> int:
        """A step is about to run; returns its number."""
        self.check_open()
        step = self.step + 1
        self._step_started_ns = time.monotonic_ns()
        assert self._state is not None
        self._state.enter_loop()
        self._injector.begin_step(step)
        return step

    def end_step(self) -> None:
        """The boundary: the step counts, its values count, and it is captured if it was named."""
        assert self._state is not None
        self.check_open()
        step = self.step + 1
        self._injector.end_step(step)
        self._records.commit(self.generation, step)
        self.step = step
        duration_ns = time.monotonic_ns() - self._step_started_ns
        self._page.finish_step(step, self.generation, duration_ns)
        self._step_seconds.append(duration_ns / 1e9)
        naming = self.worker.pass_boundary(step)
        if naming is not None and naming.generation == self.generation:
            self._capture(naming)
        self._state.pass_boundary()
        if self._entered_s:
            seconds, self._entered_s = time.monotonic() - self._entered_s, 0.0
            self.worker.send(FirstStep(generation=self.generation, step=step, seconds=seconds))

    def record(self, values: dict[str, Any]) -> None:
        self._records.add(values)

    def _capture(self, naming: CaptureStep) -> None:
        assert self._state is not None
        try:
            why = self._state.why_not_now()
            if why:
                self.worker.refuse(naming, why)
            else:
                self._state.capture(Name(step=naming.step, generation=naming.generation), naming.bank)
        except (LayoutMismatch, IntegrationError) as error:  # training goes on, and status says degraded
            self.worker.refuse(naming, str(error), is_lasting=True)

    def _on_captured(self, name: Name, bank: int, blob_len: int) -> None:
        """Capture thread: the bank is COMPLETE."""
        self._injector.on_captured(name, bank)
        self.worker.send(Captured(name=name, bank=bank, blob_len=blob_len))

    def _on_capture_failed(self, name: Name, why: str) -> None:
        """Capture thread: the bank is EMPTY."""
        self.worker.send(Refused(generation=name.generation, step=name.step, at_step=self.step, why=why))

    def _is_frozen(self) -> bool:
        """On a device the CPU runs ahead: a copy that completes after a close may hold garbage.

        On a CPU nothing runs ahead. Tensors change only inside `optimizer.step`, which waits for the copy,
        so a copy that ends after a close is as good as one that ended before.
        """
        return not isinstance(self._device, Cpu) and self.communicators.frozen()

    def _on_began(self) -> None:
        """Optimizer pre-hook: from here on the tensors of this rank may change."""
        self._began_step = self.step + 1
        self._page.begin_optimizer(self._began_step)

    # ---- failure -------------------------------------------------------------------------------------

    def judge(self, error: BaseException) -> None:
        """Return if the exception belongs to an abort; otherwise report it and wait for the verdict.

        An exception raised after a handle was closed belongs to the abort. One raised before is either a
        failed collective (the abort follows) or an error of the user's code: the leader opens a generation,
        in which this rank runs the step again; the same error twice ends the job.
        """
        self._records.drop()
        if self.communicators.closed_generation >= self.generation:
            return
        text = traceback.format_exc()
        self.worker.send(
            Raised(
                generation=self.generation,
                step=self.step + 1,
                collective=self.communicators.failed_collective(error),
                text=f"{type(error).__name__}: {error}"[:500],
                traceback=text[-20000:],
            )
        )
        traceback.clear_frames(error.__traceback__)

    def recover(self) -> None:
        """From an abort to RUNNING again; newer aborts start it over."""
        self._restore_until_running()

    def _restore_until_running(self) -> None:
        while True:
            message = self._next_of(Restore, Abort)
            if isinstance(message, Abort):
                self._unwind(message)
                continue
            if message.generation <= self.communicators.closed_generation:
                continue  # a newer abort is on its way
            try:
                self._restore(message)
            except (CollectiveAborted, RebuildTimeout) as error:
                if message.generation > self.communicators.closed_generation:
                    self._report_failed(message, error)
                continue
            if self._await_running():
                return

    def _report_failed(self, restore: Restore, error: CollectiveAborted | RebuildTimeout) -> None:
        """Name whom this rank did not reach: hosts that others reach may be cut off from this one."""
        unreached = error.missing if isinstance(error, RebuildTimeout) else ()
        if not unreached:
            silent = find_unreachable([(host, port) for _, host, port in restore.peers])
            unreached = tuple(restore.peers[index][0] for index in silent)
        self.worker.send(RestoreFailed(generation=restore.generation, why=str(error), unreached=unreached))

    def _unwind(self, abort: Abort) -> None:
        """Device at rest, captures drained: this worker is quiet. Then the garbage of the step goes."""
        assert self._state is not None
        try:
            come_to_rest(
                self._device, self._state.drain, limit_s=self.worker.config.communicator.abort_timeout_s
            )
        except DeviceLost as error:
            self.worker.give_up(f"rank {self.rank}, generation {abort.generation}: {error}")
        self.worker.restart_boundaries(self.step)
        self.worker.send(Unwound(generation=abort.generation, finished_step=self.step))
        gc.collect()  # tracebacks and graphs hold works of the old communicators; others decide meanwhile

    def _restore(self, message: Restore) -> None:
        assert self._state is not None
        started = time.monotonic()
        self.generation = message.generation
        store = self._rendezvous(message.rendezvous, message.timeout_s)
        self.communicators.open(message.generation, store, timeout_s=message.timeout_s)
        rebuilt = time.monotonic()
        # Survivors that began no optimizer step since the rollback step still hold its tensors.
        clean = not self.is_fresh and self.step == message.name.step and self._began_step <= self.step
        self._state.restore(message.bank, only_boundary=clean, serve=self.communicators.serve_next)
        self.step = message.name.step
        self._began_step = self.step
        self._page.restart(self.step, self.generation)
        self.worker.restart_boundaries(self.step)
        self.is_fresh = False
        self.worker.send(
            Restored(
                generation=message.generation,
                seconds={"rebuild": rebuilt - started, "restore": time.monotonic() - rebuilt},
            )
        )
        self.communicators.reap()

    def _await_running(self) -> bool:
        """Wait for RUNNING. False: an abort came first, and is put aside for the caller."""
        message = self._next_of(Run, Abort)
        if isinstance(message, Abort):
            self._unwind(message)
            return False
        self.is_fresh = False
        self._entered_s = time.monotonic() if self.step or self.is_promoted else 0.0
        return True

    # ---- the end -------------------------------------------------------------------------------------

    def finish_together(self) -> None:
        """Return when all ranks finished; until then this rank takes part in recoveries."""
        assert self._state is not None
        self.worker.pass_boundary(DONE_STEP)  # from here on every naming is refused
        self._state.wait()
        self.worker.send(WorkerDone(generation=self.generation, step=self.step))
        message = self._next_of(Finish, Abort)
        if isinstance(message, Abort):
            self.worker.put_back(message)
            raise CollectiveAborted(f"generation {self.generation} was closed, rank {self.rank} had finished")

    def leave(self) -> None:
        assert self._state is not None
        self._summarise()
        if self.worker.config.run.record_dir:
            self._write_final_digests(self._state)
        self._records.close()
        self._state.close()

    def _summarise(self) -> None:
        if not self._step_seconds:
            return
        ordered = sorted(self._step_seconds)
        last = len(ordered) - 1
        self.worker.send(
            Note(
                event="worker.summary",
                fields={
                    "rank": self.rank,
                    "steps": self.step,
                    "step_p50_s": ordered[last // 2],
                    "step_p90_s": ordered[last * 9 // 10],
                    "step_p99_s": ordered[last * 99 // 100],
                    "step_max_s": ordered[last],
                },
            )
        )

    def _write_final_digests(self, state: StateKeeper) -> None:
        initial = json.loads(self._digest_path("initial").read_text())
        blob = {part: hashlib.sha256(raw).hexdigest() for part, raw in state.blob_parts(self.step)}
        write_json(
            self._digest_path("rank"),
            {
                "rank": self.rank,
                "pid": self.worker.pid,
                "member": self._assignment.member,
                "steps": self.step,
                "initial": initial,
                "final": {name: digest(tensor) for name, tensor in state.named_tensors()},
                "blob": blob,
            },
        )

    # ---- waiting -------------------------------------------------------------------------------------

    def _next_of(self, *kinds: type[Any]) -> Any:
        """The next message of one of `kinds`.

        No deadline of its own: the agent's limits apply (it kills a worker that misses one), and a dead
        agent ends this process at once.
        """
        while True:
            message = self.worker.receive()
            if isinstance(message, kinds):
                return message

    def quiet(self) -> QuietSection:
        """A section in which progress is not judged."""
        return QuietSection(self._page)
