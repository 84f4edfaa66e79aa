"""What a collective returns if every rank holds what this one holds; stands in for large results."""

from __future__ import annotations

import torch

_IN_PLACE = ("allreduce", "allreduce_coalesced", "allreduce_sparse", "broadcast", "reduce")


@torch.no_grad()
def echo(op: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], rank: int, size: int) -> None:
    """Write the echo of `inputs` into `outputs` (both flattened in the order of the arguments).

    Shapes are right and values plausible (sums and broadcasts keep the own value); zeros where no input fits.
    """
    if op in _IN_PLACE:
        return  # the output is the input
    for index, output in enumerate(outputs):
        if op in ("all_gather_base", "allgather_into_tensor_coalesced"):
            _repeat(output, inputs[index], size)
        elif op in ("allgather", "gather"):
            _copy(output, inputs[index // size])
        elif op == "allgather_coalesced":  # per rank one list of all inputs
            _copy(output, inputs[index % len(inputs)])
        elif op in ("reduce_scatter_base", "reduce_scatter_tensor_coalesced"):
            _copy(output, inputs[index].reshape(-1).chunk(size)[rank])
        elif op in ("reduce_scatter", "scatter") and len(inputs) == len(outputs) * size:
            _copy(output, inputs[index * size + rank])
        elif op in ("alltoall", "alltoall_base") and index < len(inputs):
            _copy(output, inputs[index])
        else:
            output.detach().zero_()


def _copy(output: torch.Tensor, value: torch.Tensor) -> None:
    if output.numel() == value.numel() and output.dtype == value.dtype:
        output.detach().copy_(value.reshape(output.shape))
    else:
        output.detach().zero_()


def _repeat(output: torch.Tensor, value: torch.Tensor, size: int) -> None:
    if output.numel() == value.numel() * size:
        output.detach().copy_(value.reshape(1, -1).expand(size, -1).reshape(output.shape))
    else:
        output.detach().zero_()
