"""DDP after an abort: an idle reducer with the bucket layout of the resume step, on every rank.

[Note: bucket layout]
DDP sums gradients bucket by bucket. It starts with buckets in parameter order; after the first backward
with reduction, the next forward rebuilds them in the order in which gradients became ready on rank 0, and
broadcasts that order. Another layout adds in another order of elements and changes bits, and ranks with
different layouts corrupt one another. So each blob carries the rebuilt layout, and a restore installs it.

The reducer takes a layout only from `_rebuild_buckets`, which broadcasts twice (int32): the parameter
indices of all buckets in a row followed by the number of buckets, and the size of each bucket. `serve` makes
these two broadcasts return given tensors without asking a peer. `_push_all_rebuilt_params` makes the
reducer believe that a backward has been seen. Source: torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deadpool.errors import LayoutMismatch, SnapshotError

Buckets = tuple[tuple[int, ...], ...]
"""Parameter indices (in the reducer's order) of each bucket."""

Serve = Callable[[dist.ProcessGroup, list[torch.Tensor]], None]
"""Makes the next collectives of a group return the given tensors, one each, without peers."""

_DEFAULT_SAMPLE_RATE = 100  # kDDPRuntimeLoggingSampleRate in reducer.hpp
_LOGGED_LAYOUT = "rebuilt_per_bucket_param_indices"


class DdpBuckets:
    """The bucket layout of one DDP module: read before a capture, installed by a restore.

    Args:
        name: how to call the module in messages and in the blob.
        ddp: not yet trained, or with rebuilt buckets (`find_ddp_problems` refuses the state between).
    """

    def __init__(self, name: str, ddp: DistributedDataParallel) -> None:
        self.name = name
        self.ddp = ddp
        self._initial = _read_buckets(ddp)
        self._rebuilt: Buckets | None = None
        self._stats_when_fresh = list(ddp.reducer.get_backward_stats())

    @property
    def is_settled(self) -> bool:
        """False between the first backward with reduction and the forward that rebuilds the buckets."""
        if self.ddp._has_rebuilt_buckets or not _can_rebuild(self.ddp):
            return True
        # The reducer notes (in nanoseconds) when each gradient became ready; unchanged = no backward yet.
        return list(self.ddp.reducer.get_backward_stats()) == self._stats_when_fresh

    @property
    def rebuilt(self) -> Buckets | None:
        """The rebuilt layout, or None while the initial one is in use."""
        if self._rebuilt is None and self.ddp._has_rebuilt_buckets:
            self._rebuilt = _read_logged_buckets(self.ddp)
        return self._rebuilt

    def reset(self) -> None:
        """Make the reducer idle after an aborted forward or backward."""
        self.ddp.reducer._reset_state()

    def install(self, rebuilt: Buckets | None, serve: Serve) -> None:
        """Set the bucket layout of the resume step. Every rank calls it, with the same layout.

        Gradients must be in their final state: with `gradient_as_bucket_view` they move into the buckets.

        Args:
            rebuilt: layout from the blob; None goes back to the initial one, and the rebuild happens in the
                second forward, as in an undisturbed run.
            serve: makes the two broadcasts of the rebuild return given tensors.

        Raises:
            LayoutMismatch: the layout does not cover this module's parameters exactly once.
        """
        target = self._initial if rebuilt is None else rebuilt
        self._check_covers_all(target)
        reducer = self.ddp.reducer
        reducer._reset_state()
        self.ddp._has_rebuilt_buckets = False
        if not _can_rebuild(self.ddp):
            return
        device = next(param for param in self.ddp.module.parameters() if param.requires_grad).device
        order = [index for bucket in target for index in bucket] + [len(target)]
        sizes = [len(bucket) for bucket in target]
        serve(
            self.ddp.process_group,
            [torch.tensor(values, dtype=torch.int32, device=device) for values in (order, sizes)],
        )
        reducer._push_all_rebuilt_params()
        if not reducer._rebuild_buckets():
            raise SnapshotError(f"{self.name}: DDP did not accept the bucket layout of the snapshot")
        if rebuilt is None:
            reducer._reset_state()
            self._stats_when_fresh = list(reducer.get_backward_stats())
        else:
            self.ddp._has_rebuilt_buckets = True
        self._rebuilt = rebuilt

    def _check_covers_all(self, buckets: Buckets) -> None:
        expected = sorted(index for bucket in self._initial for index in bucket)
        if sorted(index for bucket in buckets for index in bucket) != expected:
            raise LayoutMismatch(
                f"{self.name}: the snapshot's bucket layout names {sum(map(len, buckets))} parameters, "
                f"this DDP module reduces {len(expected)}"
            )


def find_ddp_problems(name: str, ddp: DistributedDataParallel) -> list[str]:
    """Reasons why this DDP module cannot go on bit for bit after an abort; empty when it can."""
    problems = []
    if ddp.static_graph:
        problems.append(
            f"{name}: DDP with static_graph=True keeps its graph inside the reducer; use static_graph=False"
        )
    if ddp.mixed_precision is not None:
        problems.append(f"{name}: DDP with mixed_precision=; use torch.autocast instead")
    if getattr(ddp, "_use_python_reducer", False):
        problems.append(f"{name}: DDP with the Python reducer (compiled autograd); use the default reducer")
    if getattr(ddp, "_delay_all_reduce_params", None):
        problems.append(f"{name}: DDP with delay_all_reduce_named_params; leave that argument out")
    for hook, hook_state in getattr(ddp, "_comm_hooks", ()):
        if hook_state is not None and not isinstance(hook_state, dist.ProcessGroup):
            problems.append(
                f"{name}: communication hook {getattr(hook, '__qualname__', hook)} keeps state of its own "
                f"({type(hook_state).__qualname__}) that no snapshot holds; use a hook without state"
            )
    if not ddp._has_rebuilt_buckets and _can_rebuild(ddp) and any(ddp.reducer.get_backward_stats()):
        problems.append(
            f"{name}: exactly one backward ran before wrap, DDP's buckets are unsettled; run none, or two"
        )
    return problems


def _can_rebuild(ddp: DistributedDataParallel) -> bool:
    return not ddp.find_unused_parameters


def _read_buckets(ddp: DistributedDataParallel) -> Buckets:
    """The current buckets. Allocates zeros as large as the gradients for a moment: called once, at wrap."""
    index_of = {id(param): index for index, param in enumerate(_reduced_params(ddp))}
    return tuple(
        tuple(index_of[id(param)] for param in bucket.parameters())
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    )


def _reduced_params(ddp: DistributedDataParallel) -> Sequence[torch.nn.Parameter]:
    params, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return list(params)


def _read_logged_buckets(ddp: DistributedDataParallel) -> Buckets:
    """The rebuilt buckets as DDP's logger knows them: costs no memory, unlike `_read_buckets`."""
    # The logger notes them in sampled iterations only (the first ten, then each hundredth).
    ddp.reducer._set_ddp_runtime_logging_sample_rate(1)
    try:
        assert ddp.logger is not None
        ddp.logger.set_runtime_stats_and_log()
    finally:
        ddp.reducer._set_ddp_runtime_logging_sample_rate(_DEFAULT_SAMPLE_RATE)
    text = ddp._get_ddp_logging_data().get(_LOGGED_LAYOUT, "")  # type: ignore[no-untyped-call]
    if not text:
        raise SnapshotError("DDP has rebuilt its buckets, but does not say how")
    return tuple(tuple(int(index) for index in bucket.split()) for bucket in str(text).split(", "))
