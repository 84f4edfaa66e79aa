"""The record of a rank's constructor phase: what its collectives returned between `init` and `wrap`.

It travels with the rank's state, as msgpack; a spare that takes the rank over builds its model from it
without peers. Tensors are raw bytes. Only Python objects that went through an object collective are
pickled, as torch itself does with them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import xxhash

from deadpool.errors import ReplayMismatch

FORMAT = 1

StoreAnswer = bytes | int | bool | None


class TensorRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One output of a collective: its bytes, or only their digest when a replay echoes it locally."""

    dtype: str
    shape: list[int]
    data: bytes | None = None
    digest: bytes = b""  # xxh3-128 of an output whose bytes are not kept


class CallRecord(msgspec.Struct, array_like=True, kw_only=True):
    """One collective of one group."""

    op: str
    root: int
    echoed: bool
    outputs: list[TensorRecord]
    source_rank: int = -1  # who answered a receive from any source


class ObjectCall(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One broadcast_object_list of which this rank was the source."""

    first: int  # index of its first collective in the group
    calls: int
    pickled: bytes


class GroupRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One group, its collectives in order. Across groups there is no order: threads may use them."""

    rank: int
    size: int
    calls: list[CallRecord] = []
    objects: list[ObjectCall] = []


class RngState(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Random generators of the process at `init`."""

    python: tuple[int, list[int], float | None]
    torch: bytes
    numpy: tuple[str, bytes, int, int, float] | None = None  # None: numpy was not imported
    devices: list[bytes] = []


class ConstructorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a spare needs to build like this rank did."""

    format: int
    rank: int
    world_size: int
    rng: RngState
    groups: dict[str, GroupRecord] = {}
    store: dict[str, list[StoreAnswer]] = {}  # "method key" -> answers in order


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ConstructorRecord)


def encode_record(record: ConstructorRecord) -> bytes:
    """Encode `record` for its journey."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> ConstructorRecord:
    """Read a record back.

    Raises:
        ReplayMismatch: not a record of this version of DeadPool.
    """
    try:
        record = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ReplayMismatch(f"the constructor record ({len(data)} bytes) cannot be read: {error}") from error
    if record.format != FORMAT:
        raise ReplayMismatch(
            f"the constructor record has format {record.format}, this version reads {FORMAT}"
        )
    return record


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of `tensor` in row-major order."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


@torch.no_grad()
def fill_tensor(tensor: torch.Tensor, data: bytes) -> None:
    """Write bytes made by `tensor_bytes` into a tensor of the same dtype and shape."""
    if tensor.numel():
        source = torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)
        tensor.detach().copy_(source)


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """xxh3-128 of the elements."""
    return xxhash.xxh3_128_digest(tensor_bytes(tensor))


def describe(outputs: Sequence[torch.Tensor]) -> list[tuple[str, list[int]]]:
    """Type and shape of each tensor, for comparing and for messages."""
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in outputs]


def get_rng() -> RngState:
    """State of the random generators of python, numpy (if imported), torch and its devices."""
    version, words, gauss = random.getstate()
    numpy_state: tuple[str, bytes, int, int, float] | None = None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        numpy_state = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
    devices = [tensor_bytes(state) for state in torch.cuda.get_rng_state_all()] if _has_cuda() else []
    return RngState(
        python=(version, list(words), gauss),
        torch=tensor_bytes(torch.get_rng_state()),
        numpy=numpy_state,
        devices=devices,
    )


def set_rng(state: RngState) -> None:
    """Bring the random generators to `state`."""
    version, words, gauss = state.python
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_byte_tensor(state.torch))
    if state.numpy is not None:
        import numpy

        name, keys, position, has_gauss, cached = state.numpy
        words_array = numpy.frombuffer(keys, dtype=numpy.uint32)
        numpy.random.set_state((name, words_array, position, has_gauss, cached))
    if state.devices and _has_cuda():
        torch.cuda.set_rng_state_all([_byte_tensor(device) for device in state.devices])


def storages(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> set[int]:
    """Addresses of the storages of `tensors`: two tensors alias only if these are equal."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _has_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
