"""What an aborted iteration leaves half done in megatron-core, and how each of it is set back.

Every entry is needed: a test takes them out one by one. Garbage of the traceback is the session's to collect.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import distributed_c10d

from deadpool.plugins.megatron.objects import MegatronObjects


def forget_coalescing(objects: MegatronObjects) -> None:
    """A batch of collectives that was begun: torch refuses the next one of that group otherwise."""
    distributed_c10d._world.pg_coalesce_state.clear()


def forget_grad_reduction(objects: MegatronObjects) -> None:
    """A reduction in flight: its handle would be waited for, or stop the next one."""
    for group in objects.bucket_groups():
        group.grad_reduce_handle = None
        for flag, value in objects.internals.bucket_group_flags:
            setattr(group, flag, value)


def forget_param_gather(objects: MegatronObjects) -> None:
    """A gather in flight: the next forward would take it for done."""
    for group in objects.bucket_groups():
        group.param_gather_handle = None
        group.param_gather_dispatched = False


def forget_ready_counts(objects: MegatronObjects) -> None:
    """Gradients counted as ready: the next reduction would start too early, or fail an assertion."""
    for group in objects.bucket_groups():
        group.per_param_grad_ready_counts = {}


def drop_gradients(objects: MegatronObjects) -> None:
    """Gradients, in buffers too: a loop may zero them at the end of a step instead of its beginning.

    Leaves `no_sync` as well, which the schedules enter by hand and do not leave when a collective raises.
    """
    for chunk in objects.chunks:
        for param in chunk.parameters():
            param.grad = None
        chunk.force_all_reduce = False
        chunk.zero_grad_buffer()
    for part in objects.parts:
        part.zero_grad()


RESETS: tuple[Callable[[MegatronObjects], None], ...] = (
    forget_coalescing,
    forget_grad_reduction,
    forget_param_gather,
    forget_ready_counts,
    drop_gradients,  # last: it resets the bucket groups, which asserts on what is forgotten above
)


def reset_after_abort(objects: MegatronObjects) -> None:
    """Set everything back to where an iteration begins. Asks no peer; harmless when idle."""
    for reset in RESETS:
        reset(objects)
