"""FSDP2 after an abort at any collective: every module sharded and idle, nothing left in flight.

torch 2.13 has `FSDPModule.reset_iter_state`, but it waits for the work that was aborted, keeps gradients
that were accumulated before reduction, and older versions lack it. This reset waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

Flags = list[list[bool]]
"""Per parameter group: the switches that a training loop flips around accumulation."""

_GROUP_FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


def find_roots(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost FSDP2 modules of a model with their names."""
    roots: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_wrapped = isinstance(module, FSDPModule)
        if is_wrapped and not any(_is_inside(name, outer) for outer, _ in roots):
            roots.append((name, module))
    return roots


def find_states(root: nn.Module) -> tuple[Any, ...]:
    """All FSDP states at and below a root, each once (one state may serve several modules).

    Looked for once, at wrap: walking over all modules costs more than reading their switches.
    """
    states = {
        id(state): state
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for state in [module._get_fsdp_state()]
    }
    return tuple(states.values())


def settle_shards(states: Sequence[Any]) -> None:
    """Let every sharded parameter take its final storage now.

    The first forward does it otherwise (after `load_state_dict` or `to`, it pads and re-saves the shards),
    and would move the tensors that a capture reads.
    """
    for state in states:
        for group in _groups(state):
            group._to_sharded()
            for param in group.fsdp_params:
                param.reset_sharded_param()


def reset_after_abort(states: Sequence[Any]) -> None:
    """Bring the states back to where a step begins."""
    for state in states:
        state._training_state = type(state._training_state).IDLE
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()
        context = state._state_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        context.post_optim_event = None
        _reset_communication(state._comm_ctx)
        for group in _groups(state):
            _reset_group(group)


def read_flags(states: Sequence[Any]) -> Flags:
    """The accumulation switches of all groups, and whether this backward is the last of its step."""
    flags = [[getattr(group, name) for name in _GROUP_FLAGS] for state in states for group in _groups(state)]
    return [[state._state_ctx.is_last_backward for state in states], *flags]


def restore_flags(states: Sequence[Any], flags: Flags) -> None:
    """Set what `read_flags` returned: an abort may have left the switches of a micro-batch behind."""
    last, *of_groups = flags
    for state, is_last in zip(states, last, strict=True):
        state._state_ctx.is_last_backward = is_last
    groups = [group for state in states for group in _groups(state)]
    for group, values in zip(groups, of_groups, strict=True):
        for name, value in zip(_GROUP_FLAGS, values, strict=True):
            setattr(group, name, value)


def has_unreduced_gradients(states: Sequence[Any]) -> bool:
    """Whether gradients are accumulated in a form that only FSDP2 itself holds."""
    for state in states:
        for group in _groups(state):
            for param in group.fsdp_params:
                unsharded = getattr(param, "_unsharded_param", None)
                if param.unsharded_accumulated_grad is not None or (
                    unsharded is not None and unsharded.grad is not None
                ):
                    return True
            if group._partial_reduce_output is not None:
                return True
    return False


def _reset_communication(context: Any) -> None:
    """Drop buffers of collectives in flight. Nobody waits for them: they were aborted."""
    if not hasattr(context, "all_gather_state"):
        return  # no forward ran yet
    context.all_gather_state = None
    context.post_forward_order.clear()
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.clear()
    else:  # torch before 2.12 keeps one
        context.reduce_scatter_state = None
    if hasattr(context, "_last_post_reduce_events"):
        context._last_post_reduce_events.clear()


def _reset_group(group: Any) -> None:
    group._training_state = type(group._training_state).IDLE
    group._all_gather_result = None
    group._post_forward_indices.clear()
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._all_reduce_state = None
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        param.grad_offload_event = None
        if hasattr(param, "_unsharded_param"):  # after the first all-gather
            param._unsharded_param.grad = None
        if hasattr(param, "_extensions_data"):
            param._extensions_data.clear()
        # Whatever the states say: an abort between two of them leaves memory allocated.
        param._sharded_post_forward_param = None
        param._sharded_post_forward_param_data = None
        param.to_sharded()
    group._sharded_state = group.fsdp_params[0].sharded_state if group.fsdp_params else group._sharded_state


def _groups(state: Any) -> list[Any]:
    """The parameter groups of a state: a list since torch 2.12, one or None before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _is_inside(name: str, outer: str) -> bool:
    return outer == "" or name.startswith(f"{outer}.")
