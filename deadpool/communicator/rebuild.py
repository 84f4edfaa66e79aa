"""Building inner communicators under one generation, with a deadline and an end at close.

Each build runs on a thread of its own: gloo's constructor cannot always be interrupted, so a build that
does not end when its generation is closed is abandoned, and what it makes later is never used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from deadpool.communicator.extension import SwapBackend, native
from deadpool.communicator.inner import connect_nccl, make_gloo, make_nccl
from deadpool.errors import CollectiveAborted, RebuildTimeout

logger = logging.getLogger(__name__)

_SIGNAL_SLICE_S = 0.2
"""How long the waiting thread may be deaf to Ctrl-C."""

_REPORT_S = 2.0
"""How long past its deadline the building thread may take to say which peers are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlesBuilder:
    """Builds handles from `store` under one generation."""

    store: Store
    prefix: str  # /<job>/<generation>
    generation: int
    rank: int
    world_size: int

    def build_all(self, handles: Sequence[SwapBackend], timeout_s: float) -> None:
        """Build `handles` in this order once every rank has come; see Communicators.open."""
        everyone = range(self.world_size)
        self._run(
            lambda build, deadline_s: self._meet_and_build(build, "open", everyone, handles, deadline_s),
            timeout_s,
        )

    def build_one(self, handle: SwapBackend, members: Sequence[int], timeout_s: float) -> None:
        """Build one new handle once all `members` have come."""
        gate = f"new/{handle.handle_name}"
        self._run(
            lambda build, deadline_s: self._meet_and_build(build, gate, members, [handle], deadline_s),
            timeout_s,
        )

    def _run(self, work: Callable[[native.Build, float], None], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        build = native.Build(self.generation)
        errors: list[BaseException] = []

        def run() -> None:
            succeeded = False
            try:
                work(build, deadline_s)
                succeeded = True
            except BaseException as error:  # handed to the waiting thread, which raises it
                errors.append(error)
            finally:
                build.finish(succeeded)

        thread = threading.Thread(target=run, name="deadpool-build", daemon=True)
        thread.start()
        outcome = "running"
        try:
            while outcome == "running" and time.monotonic() < deadline_s + _REPORT_S:
                outcome = build.wait(_SIGNAL_SLICE_S)
        finally:
            if outcome == "running":
                build.abandon()
        if outcome == "done":
            thread.join()
            return
        if outcome == "closed":
            raise CollectiveAborted(
                f"generation {self.generation} was closed while rank {self.rank} built communicators"
            )
        if outcome == "failed":
            thread.join()
            error = errors[0]
            if isinstance(error, (CollectiveAborted, RebuildTimeout)):
                raise error
            raise RebuildTimeout(f"generation {self.generation}, rank {self.rank}: {error}") from error
        raise RebuildTimeout(
            f"generation {self.generation}, rank {self.rank}: not connected within {timeout_s:g} s "
            "(from rebuild_timeout_s)"
        )

    def _meet_and_build(
        self,
        build: native.Build,
        gate: str,
        members: Iterable[int],
        handles: Sequence[SwapBackend],
        deadline_s: float,
    ) -> None:
        self._meet(gate, list(members), deadline_s)
        for handle in handles:
            self._build(build, handle, deadline_s)

    def _meet(self, gate: str, members: list[int], deadline_s: float) -> None:
        """Wait for every member: connecting starts when all are there, and the missing have names."""
        keys = [f"{self.prefix}/gate/{gate}/{rank}" for rank in members]
        self.store.set(f"{self.prefix}/gate/{gate}/{self.rank}", "1")
        limit_s = max(0.001, deadline_s - time.monotonic())
        try:
            self.store.wait(keys, timedelta(seconds=limit_s))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            missing = [rank for rank, key in zip(members, keys, strict=True) if not self.store.check([key])]
            raise RebuildTimeout(
                f"generation {self.generation}, rank {self.rank}: ranks {missing} did not come to {gate!r} "
                f"within {limit_s:.1f} s",
                missing,
            ) from error

    def _build(self, build: native.Build, handle: SwapBackend, deadline_s: float) -> None:
        build.begin(handle.handle_name)
        store = c10d.PrefixStore(f"{self.prefix}/{handle.handle_name}", self.store)
        timeout = handle.options._timeout
        if handle.kind == "nccl":
            communicator = make_nccl(store, handle.rank(), handle.size(), handle.options)
            build.install(handle, communicator)  # first: an abort must reach it while it connects
            handle.set_nccl_raw(connect_nccl(communicator))
        else:
            connect = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
            communicator = make_gloo(store, handle.rank(), handle.size(), min(timeout, connect))
            communicator.set_timeout(timeout)
            build.install(handle, communicator)
