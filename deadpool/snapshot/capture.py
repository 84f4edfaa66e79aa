"""Copy of the live tensors into a bank, off the critical path.

[Note: why one call in one thread]
Parameters and optimizer state change only inside `optimizer.step`, so the copy of step s may run during
the forward and backward of step s+1, straight from the live tensors. On a CPU it is ONE
`torch._foreach_copy_` in one background thread: hundreds of single copies beside a Python training thread
took 1,487 ms instead of 27, a GIL hand-over of 5 ms each. The thread copies with one intra-op thread,
because a second OpenMP pool beside the training's own would fight for the same cores. The optimizer's
pre-hook waits for the copy.

What a forward may write (buffers) is copied at the boundary, on the training thread. A tensor that
changes during the copy after all is found by its version counter, and the copy does not count. That is a
net below the rule, not the rule: a change still going on when the copy ends has not moved its counter yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deadpool.errors import LayoutMismatch, SnapshotError
from deadpool.snapshot.codec import dtype_name
from deadpool.snapshot.layout import Buffer, Kind, Layout
from deadpool.snapshot.tensors import NamedTensor
from deadpool.words import listed

# Between two chunks a cancelled copy stops: 1 GiB takes 0.1-0.3 s, the abort's limit is 10 s. A smaller state
# is one call.
CHUNK_BYTES = 1 << 30
COPY_DEADLINE_S = 120.0  # nothing but a dead machine takes that long; then the training thread raises

Bank = tuple[memoryview, memoryview]
"""Unique area and replicated area of one bank."""

OnDone = Callable[[int, str | None], None]
"""Called from the copying thread: bank, and the reason why the copy does not count (None: complete)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """Counters since the start."""

    captures: int = 0
    waits: int = 0  # times that the training thread had to wait for a copy
    waited_s: float = 0.0
    copied_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One copy into a bank; the version counters of its sources at the boundary."""

    bank: int
    versions: list[int]


class Capture:
    """Copies the state into one of two banks, in the background.

    Owns one thread; `close` ends it. All methods are for the training thread, `on_done` comes from the
    copying thread. For CPU tensors; `CudaCapture` is for a GPU.

    Args:
        layout: of `tensors`, in the same order.
        tensors: the state's tensors.
        banks: the areas of bank 0 and bank 1.
        on_done: told once per `start` how it ended.
        frozen: asked when a copy completes; from the moment it returns True nothing is reported as complete.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[NamedTensor],
        banks: Sequence[Bank],
        *,
        on_done: OnDone,
        frozen: Callable[[], bool],
    ) -> None:
        _check_order(layout, tensors)
        self._tensors = tuple(tensors)
        self._on_done = on_done
        self._frozen = frozen
        self._banks = tuple(banks)
        filled = [index for index, buffer in enumerate(layout.buffers) if buffer.nbytes]
        boundary = [index for index in filled if self._is_copied_at_boundary(self._tensors[index])]
        background = [index for index in filled if not self._is_copied_at_boundary(self._tensors[index])]
        views = [bank_tensors(layout, *bank) for bank in banks]
        self._boundary = [self._tensors[index] for index in boundary]
        self._boundary_targets = [[view[index] for index in boundary] for view in views]
        self._background = [self._tensors[index] for index in background]
        self._targets = [[view[index] for index in background] for view in views]
        self._chunks = _chunk([layout.buffers[index].nbytes for index in background])
        # Found once; that each is still what the optimizer updates is checked after every copy.
        self._resolvers = [item.resolve for item in self._background]
        self._sources = [resolve().detach() for resolve in self._resolvers]
        self._addresses = [source.data_ptr() for source in self._sources]
        self._stats = CaptureStats()
        self._cancelled = False
        self._has_moved = False  # so the newest copy has found
        self._copied = threading.Event()  # the live tensors may change
        self._settled = threading.Event()  # on_done has returned
        self._copied.set()
        self._settled.set()
        self._open()

    @property
    def stats(self) -> CaptureStats:
        return self._stats

    @property
    def is_busy(self) -> bool:
        """Whether a copy still reads the live tensors."""
        return not self._copied.is_set()

    def start(self, bank: int) -> None:
        """Copy what a forward may write, and hand the rest to the background.

        Called at a step's boundary; returns at once unless the copy before is still running (a step without
        an optimizer step): then it waits for that first. A parameter or optimizer state that moved to other
        memory is named to `on_done`, and the copy does not count; from the next call on it is raised.

        Raises:
            LayoutMismatch: a buffer changed shape or dtype, or what the copy before found elsewhere still is;
                names it. Nothing was copied and `on_done` is not called.
        """
        self.wait()
        if not self._thread.is_alive():
            raise SnapshotError("the capture thread has ended: its report failed, or the capture was closed")
        if not self._settled.wait(COPY_DEADLINE_S):
            raise SnapshotError(f"reporting the copy before took more than {COPY_DEADLINE_S:.0f} s")
        if self._has_moved and (reason := self._find_move()):
            raise LayoutMismatch(reason)
        boundary = self._read_boundary()
        self._cancelled = False
        if boundary:
            self._copy_at_boundary(self._boundary_targets[bank], boundary)
        self._stats = replace(self._stats, captures=self._stats.captures + 1)
        self._copied.clear()
        self._settled.clear()
        self._launch(Job(bank, [source._version for source in self._sources]))

    def wait(self) -> None:
        """Return once the live tensors may change. Free when no copy is running."""
        if self._copied.is_set():
            return
        begin_s = time.monotonic()
        if not self._copied.wait(COPY_DEADLINE_S):
            raise SnapshotError(f"a copy into host memory took more than {COPY_DEADLINE_S:.0f} s")
        self._count_wait(begin_s)

    def cancel(self) -> None:
        """Make the copy in flight, if any, end early and not count."""
        self._cancelled = True

    def drain(self, deadline_s: float) -> bool:
        """Wait until no copy runs and `on_done` has returned.

        Returns:
            False if that took longer than `deadline_s`.
        """
        return self._settled.wait(deadline_s)

    def close(self, deadline_s: float = 10.0) -> None:
        """End the thread, and let go of the banks' memory."""
        self.cancel()
        self._shut(deadline_s)
        self._targets = self._boundary_targets = []
        self._banks = ()

    def _count_wait(self, begin_s: float) -> None:
        waited_s = self._stats.waited_s + time.monotonic() - begin_s
        self._stats = replace(self._stats, waits=self._stats.waits + 1, waited_s=waited_s)

    def _is_copied_at_boundary(self, item: NamedTensor) -> bool:
        return item.at_boundary

    def _copy_at_boundary(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

    def _read_boundary(self) -> list[torch.Tensor]:
        """The buffers as they are now: a forward may replace them, but not by another shape or dtype."""
        live = [item.resolve().detach() for item in self._boundary]
        wrong = [
            f"{item.name} is now {dtype_name(tensor.dtype)}{list(tensor.shape)}, "
            f"it was {dtype_name(target.dtype)}{list(target.shape)}"
            for item, tensor, target in zip(self._boundary, live, self._boundary_targets[0], strict=True)
            if tensor.dtype is not target.dtype or tensor.shape != target.shape
        ]
        if wrong:
            raise LayoutMismatch(_explain(wrong))
        return live

    # The copying thread.

    def _open(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        ready = threading.Event()
        threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="deadpool-capture", daemon=True)
        self._thread.start()
        if not ready.wait(COPY_DEADLINE_S):
            raise SnapshotError("the capture thread did not start")
        # set_num_threads is per thread for OpenMP, but also notes the number for threads made later.
        torch.set_num_threads(threads)

    def _launch(self, job: Job) -> None:
        self._jobs.put(job)

    def _shut(self, deadline_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(deadline_s)

    def _run(self, ready: threading.Event) -> None:
        torch.set_num_threads(1)
        ready.set()
        while (job := self._jobs.get()) is not None:
            begin_s = time.monotonic()
            moved: str | None = None
            try:
                reason = self._copy(job)
                if reason is None:
                    reason = moved = self._find_move()
            except Exception as error:  # reported by name: a copy that failed must not end the training
                reason = f"the copy failed: {error!r}"
            self._stats = replace(self._stats, copied_s=self._stats.copied_s + time.monotonic() - begin_s)
            self._has_moved = moved is not None
            self._finish(job.bank, reason)

    def _copy(self, job: Job) -> str | None:
        targets = self._targets[job.bank]
        with torch.no_grad():
            for first, last in self._chunks:
                if self._cancelled:
                    return "cancelled"
                torch._foreach_copy_(targets[first:last], self._sources[first:last])
        return self._find_change(job)

    def _find_move(self) -> str | None:
        """The reason why the copy is not one of the live tensors: some are elsewhere by now.

        Here, since a look at hundreds of tensors that are in no cache costs the training thread 0.5 ms.
        """
        addresses = [resolve().data_ptr() for resolve in self._resolvers]
        if addresses == self._addresses:
            return None
        pairs = zip(self._background, addresses, self._addresses, strict=True)
        return _explain([f"{item.name} moved to other memory" for item, now, then in pairs if now != then])

    def _find_change(self, job: Job) -> str | None:
        """The reason why the copy may be torn: somebody changed what the optimizer alone may change."""
        changed = [
            item.name
            for item, source, version in zip(self._background, self._sources, job.versions, strict=True)
            if source._version != version
        ]
        if not changed:
            return None
        return (
            f"{listed(changed)} changed while copied: only optimizer.step of an optimizer given to "
            "wrap may change parameters and optimizer state (register what a forward changes as a buffer)"
        )

    def _finish(self, bank: int, reason: str | None) -> None:
        if reason is None and self._cancelled:
            reason = "cancelled"
        if reason is None and self._frozen():
            reason = "frozen: the communicators of this generation were closed"
        self._copied.set()
        try:
            self._on_done(bank, reason)
        finally:
            self._settled.set()


def install_hooks(
    optimizers: Iterable[torch.optim.Optimizer], capture: Capture, on_began: Callable[[], None]
) -> Callable[[], None]:
    """Let every optimizer step wait for the copy, and say that it begins.

    Args:
        optimizers: all optimizers of the state.
        capture: waited for before the first kernel of a step.
        on_began: called after the wait and before the step changes anything.

    Returns:
        A function that removes the hooks.
    """

    def before_step(*_: Any) -> None:
        capture.wait()
        on_began()

    handles: list[RemovableHandle] = [
        optimizer.register_step_pre_hook(before_step) for optimizer in optimizers
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def bank_tensors(layout: Layout, unique: memoryview, replicated: memoryview) -> list[torch.Tensor]:
    """Tensors that lie in a bank's memory, in layout order.

    Raises:
        LayoutMismatch: an area is smaller than the layout needs.
    """
    for area, needed, what in (
        (unique, layout.unique_bytes, "unique"),
        (replicated, layout.replicated_bytes, "replicated"),
    ):
        if area.nbytes < needed:
            raise LayoutMismatch(f"the {what} area has {area.nbytes} bytes, the layout needs {needed}")
    return [_view(buffer, unique if buffer.kind is Kind.UNIQUE else replicated) for buffer in layout.buffers]


def _view(buffer: Buffer, area: memoryview) -> torch.Tensor:
    dtype = getattr(torch, buffer.dtype)
    if buffer.nbytes == 0:
        return torch.empty(buffer.shape, dtype=dtype)
    raw = torch.frombuffer(area, dtype=torch.uint8, count=buffer.nbytes, offset=buffer.offset)
    return raw.view(dtype).view(buffer.shape)


def _check_order(layout: Layout, tensors: Sequence[NamedTensor]) -> None:
    if [buffer.name for buffer in layout.buffers] != [item.name for item in tensors]:
        raise LayoutMismatch("the layout was made for other tensors than it is used with")


def _chunk(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of indices of at most CHUNK_BYTES each (one tensor at least)."""
    chunks: list[tuple[int, int]] = []
    first, total = 0, 0
    for index, nbytes in enumerate(sizes):
        if index > first and total + nbytes > CHUNK_BYTES:
            chunks.append((first, index))
            first, total = index, 0
        total += nbytes
    return [*chunks, (first, len(sizes))] if sizes else []


def _explain(wrong: Sequence[str]) -> str:
    return (
        f"the training state is no longer what wrap was given: {listed(wrong)}. "
        "Change tensors in place (copy_), and call wrap after load_state_dict, to() and compile"
    )
