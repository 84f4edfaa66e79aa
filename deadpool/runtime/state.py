"""The training state of one rank, as the session handles it: the snapshot package bound to a segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from deadpool.core.types import Name
from deadpool.errors import LayoutMismatch
from deadpool.runtime.once import OnceArea
from deadpool.snapshot import codec
from deadpool.snapshot.agreement import describe_buffers, digest_groups, find_unlike_groups, refuse_unlike
from deadpool.snapshot.blob import Blob, build_blob, capacity_for, read_blob, why_not_now
from deadpool.snapshot.capture import Capture, install_hooks
from deadpool.snapshot.capture_cuda import make_capture
from deadpool.snapshot.frameworks.ddp import Serve
from deadpool.snapshot.layout import Layout, find_disagreements
from deadpool.snapshot.restore import reset_after_abort, restore_blob, restore_rng, restore_tensors
from deadpool.snapshot.stateful import collect, hash_replicated, layout_of
from deadpool.snapshot.tensors import NamedTensor
from deadpool.store.segment import BANKS, BankState, Segment

DRAIN_TIMEOUT_S = 10.0
_T = TypeVar("_T")


class StateKeeper:
    """Collects the state given to `wrap`; captures it into a segment and restores it from there.

    Args:
        objects: keyword -> model, optimizer, data, scheduler, ... as given to `wrap`.

    Raises:
        ConfigError: something cannot be protected; every problem is listed.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._state = collect(objects)
        self._layout: Layout | None = None
        self._segment: Segment | None = None
        self._capture: Capture | None = None
        self._remove_hooks: Callable[[], None] | None = None
        self._names: dict[int, tuple[Name, int]] = {}  # bank -> name and blob length being captured
        self._on_captured: Callable[[Name, int, int], None] = lambda name, bank, blob_len: None
        self._on_failed: Callable[[Name, str], None] = lambda name, why: None
        self._blob_capacity = 0
        self._has_stepped = False
        self._in_loop = False  # whether `train` has taken a step: see [Note] in snapshot.rng
        self._entering: Blob | None = None  # restored, and its loop has not taken a step yet
        self.hold: str | None = None  # why no boundary may be captured now; set by `wrap_step`

    # ---- layout --------------------------------------------------------------------------------------

    def settle_layout(self, record: bytes, world_size: int, ranks_per_host: int) -> OnceArea:
        """First start: decide with all ranks which buffers are replicated, and close the layout.

        Raises:
            LayoutMismatch: ranks of one replicated group built different states.
        """

        def is_safe(ranks: tuple[int, ...]) -> bool:
            return len({rank // ranks_per_host for rank in ranks}) > 1

        layout = layout_of(self._state, is_safe=is_safe)
        unlike = find_unlike_groups(_gather(digest_groups(layout), world_size))
        if unlike:
            refuse_unlike(unlike, _gather(describe_buffers(layout, unlike), world_size))
        disagreeing = find_disagreements(layout, _gather(hash_replicated(self._state, layout), world_size))
        if disagreeing:
            layout = layout.with_unique(disagreeing)
        self._layout = layout
        self._blob_capacity = capacity_for(len(self._build_blob(0)))
        return OnceArea(
            record=record,
            layout=layout.to_json(),
            layout_hash=layout.digest,
            blob_capacity=self._blob_capacity,
            unique_bytes=layout.unique_bytes,
            replicated_bytes=layout.replicated_bytes,
            spans=[(list(span.group.ranks), span.start, span.nbytes) for span in layout.spans],
        )

    def adopt_layout(self, once: OnceArea) -> None:
        """Promoted spare: take the layout of the rank it takes over.

        Raises:
            LayoutMismatch: the script built another state than on the rank it takes over.
        """
        self._layout = layout_of(self._state).fitted_to(Layout.from_json(once.layout))
        self._blob_capacity = once.blob_capacity

    def bind(
        self,
        segment: Segment,
        *,
        on_captured: Callable[[Name, int, int], None],
        on_failed: Callable[[Name, str], None],
        on_began: Callable[[], None],
        frozen: Callable[[], bool],
    ) -> None:
        """Capture into `segment` from now on.

        Args:
            segment: of this rank.
            on_captured: capture thread: (name, bank, blob length), the bank is COMPLETE.
            on_failed: capture thread: (name, why), the bank is EMPTY.
            on_began: training thread: an optimizer is about to change tensors.
            frozen: whether nothing may be reported as complete any more.
        """
        assert self._layout is not None
        self._segment = segment
        self._on_captured = on_captured
        self._on_failed = on_failed
        banks = [(segment.unique_view(bank), segment.replicated_view(bank)) for bank in BANKS]
        self._capture = make_capture(
            self._layout, self._state.tensors, banks, on_done=self._done, frozen=frozen
        )

        def began() -> None:
            self._has_stepped = True
            on_began()

        self._remove_hooks = install_hooks(self.optimizers(), self._capture, began)

    def close(self) -> None:
        if self._remove_hooks is not None:
            self._remove_hooks()
        if self._capture is not None:
            self._capture.close()

    # ---- capture -------------------------------------------------------------------------------------

    def why_not_now(self) -> str | None:
        """Why the state at this boundary cannot be captured; None if it can.

        Raises:
            LayoutMismatch: nor can it be at any later one.
        """
        return self.hold or why_not_now(self._state, has_stepped=self._has_stepped)

    def pass_boundary(self) -> None:
        """A boundary was passed, captured or not: the next step begins."""
        self._has_stepped = False

    def capture(self, name: Name, bank: int) -> None:
        """Copy the state at this boundary into `bank`: the blob now, the tensors in the background.

        Raises:
            LayoutMismatch: a buffer changed shape, or the blob outgrew its place; nothing was captured.
            IntegrationError: the blob holds something that cannot be stored any more.
        """
        assert self._segment is not None and self._capture is not None
        blob = self._build_blob(name.step)
        if len(blob) > self._blob_capacity:
            raise LayoutMismatch(
                f"the small state of step {name.step} takes {len(blob)} bytes, its place has "
                f"{self._blob_capacity}: it grew since the start; keep what grows with the steps out of wrap"
            )
        self._capture.wait()
        self._segment.begin(bank, name)
        self._segment.blob_view(bank)[: len(blob)] = blob
        self._names[bank] = (name, len(blob))
        try:
            self._capture.start(bank)
        except LayoutMismatch:
            self._segment.empty(bank)
            raise

    def wait(self) -> None:
        """Return once no copy reads the live tensors."""
        if self._capture is not None:
            self._capture.wait()

    def drain(self) -> None:
        """Abort: let the copy in flight end; a bank that did not become complete is EMPTY afterwards."""
        if self._capture is None or self._segment is None:
            return
        if not self._capture.drain(DRAIN_TIMEOUT_S):
            raise TimeoutError(f"a copy into host memory did not end within {DRAIN_TIMEOUT_S:.0f} s")
        for bank in BANKS:
            if self._segment.bank_info(bank).state is BankState.WRITING:
                self._segment.empty(bank)

    def _done(self, bank: int, problem: str | None) -> None:
        assert self._segment is not None
        name, blob_len = self._names[bank]
        if problem is None:
            self._segment.complete(bank, blob_len=blob_len)
            self._on_captured(name, bank, blob_len)
        else:
            self._segment.empty(bank)
            self._on_failed(name, problem)

    def _build_blob(self, step: int) -> bytes:
        return build_blob(self._state, step=step, in_loop=self._in_loop)

    # ---- restore -------------------------------------------------------------------------------------

    def restore(self, bank: int, *, only_boundary: bool, serve: Serve) -> None:
        """Stand where the snapshot in `bank` was taken. The order matters: RNG comes last."""
        assert self._segment is not None and self._layout is not None
        reset_after_abort(self._state)
        restore_tensors(
            self._state,
            self._layout,
            self._segment.unique_view(bank),
            self._segment.replicated_view(bank),
            only_boundary=only_boundary,
        )
        info = self._segment.bank_info(bank)
        blob = read_blob(bytes(self._segment.blob_view(bank)[: info.blob_len]))
        restore_blob(self._state, blob, serve=serve)
        restore_rng(self._state, blob)
        self._entering = blob if blob.in_loop else None
        self._has_stepped = False

    def enter_loop(self) -> None:
        """The loop takes a step. After a restore, what building its iterators drew is undone first."""
        self._in_loop = True
        if self._entering is not None:
            restore_rng(self._state, self._entering)
            self._entering = None

    # ---- questions -----------------------------------------------------------------------------------

    def modules(self) -> list[torch.nn.Module]:
        return [module for _, module in self._state.models]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for _, optimizer in self._state.optimizers]

    def live_tensors(self) -> list[torch.Tensor]:
        """All tensors that a restore overwrites."""
        return [item.resolve() for item in self._state.tensors]

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        items: tuple[NamedTensor, ...] = self._state.tensors
        return [(item.name, item.resolve()) for item in items]

    def blob_parts(self, step: int) -> Iterator[tuple[str, bytes]]:
        """The parts of the blob after `step`, encoded one by one, for comparison."""
        blob = read_blob(self._build_blob(step))
        generators = {f"rng.{name}": value for name, value in blob.rng.items()}
        for name, value in (("step", blob.step), *generators.items(), *blob.parts.items()):
            yield str(name), codec.pack(value, str(name))


def _gather(mine: _T, world_size: int) -> dict[int, _T]:
    """Rank -> what that rank passed."""
    gathered: list[_T | None] = [None] * world_size
    dist.all_gather_object(gathered, mine)
    return {rank: each for rank, each in enumerate(gathered) if each is not None}
