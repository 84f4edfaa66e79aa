"""The copy from a GPU: one batched copy on a side stream into pinned bank memory.

[Note: who waits for whom]
The side stream waits for the compute stream at the boundary, the compute stream waits for the copy's event
before the next optimizer step; both waits are on the device, the training thread goes on. The copying
thread only waits for the event to report it. Version counters move when a kernel is enqueued, long before
it runs: so they are compared when the optimizer's pre-hook runs, or when the copy completes, whichever
comes first.

Never run on a GPU yet. The CPU class shares all but what is in this file, and of this file all but `CudaLane`
is tested on a CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from deadpool.errors import SnapshotError
from deadpool.snapshot.capture import Bank, Capture, Job, OnDone
from deadpool.snapshot.layout import Layout
from deadpool.snapshot.tensors import NamedTensor


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Lane(Protocol):
    """Copies beside the compute stream of one device."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """The tensor is on that device."""

    def pin(self, area: memoryview) -> int:
        """Make host memory a target of asynchronous copies; returns its address."""

    def unpin(self, address: int) -> None: ...

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Event:
        """Enqueue copies behind everything that compute has enqueued so far."""

    def hold_compute(self, event: Event) -> None:
        """Order whatever compute enqueues next behind the event. Does not block the caller."""


class CudaLane:
    """A side stream of the current CUDA device."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        # The default priority is the lowest: compute at a higher one and NCCL go first.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def pin(self, area: memoryview) -> int:
        tensor = torch.frombuffer(area, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        if int(error) != 0:
            raise SnapshotError(
                f"cudaHostRegister of {tensor.numel()} bytes of bank memory failed with code {int(error)}; "
                "raise the limit of locked memory (ulimit -l)"
            )
        return tensor.data_ptr()

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Event:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            if targets:
                torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            return _CudaEvent(self._device, self._stream)

    def hold_compute(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream().wait_event(event.raw)


class _CudaEvent:
    """An event that any thread may wait for."""

    def __init__(self, device: int, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.raw = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.raw.record(stream)

    def query(self) -> bool:
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self.raw.synchronize()  # releases the GIL


class CudaCapture(Capture):
    """Like `Capture`, for a state on a device.

    Tensors of the state that lie on the CPU (step counts) are copied at the boundary.

    Args:
        lane: where copies run; by default a side stream of the current CUDA device. Others as for `Capture`.
    """

    _flight: _Flight | None
    _flights: dict[int, _Flight]

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[NamedTensor],
        banks: Sequence[Bank],
        *,
        on_done: OnDone,
        frozen: Callable[[], bool],
        lane: Lane | None = None,
    ) -> None:
        self._lane = CudaLane() if lane is None else lane  # first: the base asks where tensors lie
        super().__init__(layout, tensors, banks, on_done=on_done, frozen=frozen)

    def wait(self) -> None:
        """Order the next kernels behind the copy. Blocks the device's stream if need be, never the thread."""
        flight = self._flight
        if flight is None:
            return
        self._flight = None
        self._check(flight)
        if not flight.event.query():
            begin_s = time.monotonic()
            self._lane.hold_compute(flight.event)
            self._count_wait(begin_s)

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._flight = None
        self._flights = {}
        self._pinned = [self._lane.pin(area) for bank in self._banks for area in bank if area.nbytes]
        super()._open()

    def _shut(self, deadline_s: float) -> None:
        super()._shut(deadline_s)
        for address in self._pinned:
            self._lane.unpin(address)
        self._pinned = []

    def _is_copied_at_boundary(self, item: NamedTensor) -> bool:
        return super()._is_copied_at_boundary(item) or not self._lane.holds(item.resolve())

    def _copy_at_boundary(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        # On the compute stream, so in front of the next forward; the side stream waits for it.
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _launch(self, job: Job) -> None:
        event = self._lane.copy(self._targets[job.bank], self._sources)
        self._flight = self._flights[job.bank] = _Flight(job, event)
        super()._launch(job)

    def _copy(self, job: Job) -> str | None:
        """The end of the copy: nothing is reported before its event; the freeze is looked at afterwards."""
        flight = self._flights.pop(job.bank)
        flight.event.synchronize()
        self._check(flight)
        return flight.reason

    def _check(self, flight: _Flight) -> None:
        """Compare the version counters, the first time only: later the optimizer's step has moved them."""
        with self._lock:
            if not flight.is_checked:
                flight.is_checked, flight.reason = True, self._find_change(flight.job)


class _Flight:
    """A copy on the device."""

    def __init__(self, job: Job, event: Event) -> None:
        self.job = job
        self.event = event
        self.is_checked = False
        self.reason: str | None = None


def make_capture(
    layout: Layout,
    tensors: Sequence[NamedTensor],
    banks: Sequence[Bank],
    *,
    on_done: OnDone,
    frozen: Callable[[], bool],
) -> Capture:
    """The capture for where the state lies: on a GPU if any tensor does. Arguments as for `Capture`."""
    kind = CudaCapture if any(item.resolve().is_cuda for item in tensors) else Capture
    return kind(layout, tensors, banks, on_done=on_done, frozen=frozen)
