"""What this host reports to the leader: lost workers, errors of the user's code, failed collectives."""

from __future__ import annotations

import time

from deadpool.core.types import Fault, FaultKind, MemberId
from deadpool.runtime.messages import Raised
from deadpool.runtime.parts import HostParts
from deadpool.runtime.workforce import Worker

USER_ERROR_DELAY_S = 1.0
"""An error that looks like the user's is reported after this: the death of a peer, which raises too, is
known by then (measured: a killed process is noticed within 0.1 s)."""


class FaultReports:
    """Faults of one generation at a time, on the agent's main thread.

    Args:
        member: this incarnation.
        parts: see HostParts.
    """

    def __init__(self, member: MemberId, parts: HostParts) -> None:
        self.has_reported = False  # in this generation
        self._member = member
        self._parts = parts
        self._generation = 0
        self._lost: set[int] = set()  # ranks already reported lost
        self._errors: set[int] = set()  # ranks whose error was reported
        self._raised: dict[int, tuple[float, Raised]] = {}  # rank -> when to report what it raised

    def begin(self, generation: int) -> None:
        """A newer generation: what was raised in an older one belongs to its abort."""
        self._generation = generation
        self.has_reported = False
        self._lost.clear()
        self._errors.clear()
        self._raised.clear()

    def tick(self) -> None:
        now_s = time.monotonic()
        for rank, (due_s, raised) in list(self._raised.items()):
            if now_s >= due_s:
                del self._raised[rank]
                self._report_raised(rank, raised, FaultKind.USER_ERROR)

    def raised(self, rank: int, message: Raised) -> None:
        """An exception left the user's code; no handle had been closed."""
        if message.generation != self._generation and message.step >= 0:
            return
        if message.bad_input:
            self._report_raised(rank, message, FaultKind.BAD_INPUT)
        elif message.collective:
            self._report_raised(rank, message, FaultKind.COLLECTIVE)
        else:
            delay_s = 0.0 if message.step < 0 else USER_ERROR_DELAY_S
            self._raised[rank] = (time.monotonic() + delay_s, message)

    def lost(self, worker: Worker, cause: str) -> None:
        """The worker of a rank is gone. What it raised before is the cause, if it raised anything."""
        rank = worker.rank
        raised = self._raised.pop(rank, None)
        if raised is not None:
            self._report_raised(rank, raised[1], FaultKind.USER_ERROR)
        elif rank not in self._errors:
            kind = FaultKind.ABORT_TIMEOUT if worker.killed_for else FaultKind.WORKER_EXIT
            self._lost.add(rank)
            text = f"worker of rank {rank} {cause}"
            self.report(kind, tuple(sorted(self._lost)), text, worker.finished_step + 1)

    def unreaped(self, worker: Worker) -> None:
        """A killed worker does not go: the host is bad. One that rehearsed has no rank to be named."""
        pid = worker.handle.pid
        self._parts.log.emit("worker.unreaped", rank=worker.rank, pid=pid)
        ranks = () if worker.handle.is_parked else (worker.rank,)
        text = f"process {pid} was killed and does not end"
        self.report(FaultKind.DEVICE, ranks, text, worker.finished_now() + 1)

    def bad_input(self, rank: int, text: str) -> None:
        """This agent found what the user has to mend. The View's reason has one line; here all are shown."""
        self._parts.log.say(f"deadpool: rank {rank}: {text}")
        self.report(FaultKind.BAD_INPUT, (rank,), text, 0)

    def not_rebuilt(self, worker: Worker, why: str, unreached: tuple[int, ...]) -> None:
        """The communicators of a rank were not built; it did not reach these ranks."""
        rank = worker.rank
        pairs = tuple((rank, other) for other in unreached)
        text = f"rebuild: {why}"
        self.report(FaultKind.COLLECTIVE, (rank,), text, worker.finished_now() + 1, pairs)

    def report(
        self,
        kind: FaultKind,
        ranks: tuple[int, ...],
        detail: str,
        step: int,
        pairs: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Tell the leader, through the control plane."""
        self.has_reported = True
        fault = Fault(
            kind=kind,
            member=self._member,
            generation=self._generation,
            ranks=ranks,
            step=max(0, step),
            pairs=pairs,
            detail=detail,
        )
        parts = self._parts
        parts.log.emit(
            "fault.reported",
            generation=self._generation,
            kind=kind.value,
            ranks=list(ranks),
            detail=detail.strip().splitlines()[-1][:300] if detail.strip() else "",
        )
        parts.writer.put(self._generation, f"fault {kind.value}", lambda: parts.registry.put_fault(fault))

    def _report_raised(self, rank: int, message: Raised, kind: FaultKind) -> None:
        if kind is not FaultKind.COLLECTIVE:
            self._errors.add(rank)
            self._parts.log.say(f"[rank {rank}] {message.traceback}")
        detail = message.text if kind is FaultKind.COLLECTIVE else message.traceback
        self.report(kind, (rank,), detail, message.step)
