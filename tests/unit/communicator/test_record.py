"""The record of a constructor phase, its parts and its encoding."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from deadpool.communicator.echo import echo
from deadpool.communicator.record import (
    FORMAT,
    CallRecord,
    ConstructorRecord,
    GroupRecord,
    TensorRecord,
    decode_record,
    encode_record,
    fill_tensor,
    get_rng,
    set_rng,
    tensor_bytes,
)
from deadpool.communicator.recorder import LARGE_BYTES, SMALL_BYTES, Recorder
from deadpool.errors import ReplayMismatch


def _draw() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def test_a_record_survives_its_encoding() -> None:
    call = CallRecord(
        op="broadcast",
        root=0,
        echoed=False,
        outputs=[TensorRecord(dtype="int64", shape=[2], data=b"\x00" * 16)],
    )
    record = ConstructorRecord(
        format=FORMAT,
        rank=1,
        world_size=4,
        rng=get_rng(),
        groups={"0": GroupRecord(rank=1, size=4, calls=[call])},
        store={"get key": [b"value"], "add n": [3]},
    )
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize("data", [b"", b"\xff" * 20, msgspec.msgpack.encode({"format": 1})])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(ReplayMismatch, match="cannot be read"):
        decode_record(data)


def test_a_record_of_another_format_is_refused() -> None:
    record = ConstructorRecord(format=FORMAT + 1, rank=0, world_size=1, rng=get_rng())
    with pytest.raises(ReplayMismatch, match="has format"):
        decode_record(encode_record(record))


def test_random_generators_go_on_as_if_nothing_had_happened() -> None:
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(get_rng()), type=type(get_rng()))
    first = _draw()
    random.gauss(0, 1)
    _draw()
    set_rng(state)
    assert _draw() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    original = torch.arange(12).reshape(3, 4).to(dtype)
    original = original if shape == (3, 4) else original[0, 1] if shape == () else original.reshape(-1)[:0]
    copy = torch.zeros_like(original)
    fill_tensor(copy, tensor_bytes(original))
    assert torch.equal(copy, original)


def test_a_tensor_that_is_not_contiguous_is_recorded_in_logical_order() -> None:
    original = torch.arange(6.0).reshape(2, 3).t()
    copy = torch.zeros(3, 2)
    fill_tensor(copy, tensor_bytes(original))
    assert torch.equal(copy, original)


@pytest.mark.parametrize(
    ("outputs", "kept"),
    [
        ([torch.zeros(SMALL_BYTES // 4)], True),
        ([torch.zeros(SMALL_BYTES // 4 + 1)], False),
        ([torch.zeros(SMALL_BYTES, dtype=torch.int64)], True),
        ([torch.zeros(SMALL_BYTES // 4), torch.zeros(1, dtype=torch.int32)], True),
        ([torch.empty(LARGE_BYTES + 1, dtype=torch.int8)], False),
    ],
    ids=["small", "large float", "large integer", "float with an integer", "huge integer"],
)
def test_what_a_restore_cannot_bring_back_is_kept(outputs: list[torch.Tensor], kept: bool) -> None:
    recorder = Recorder(0, 1)
    try:
        assert recorder._keeps(outputs) is kept
    finally:
        recorder.close()


def test_parameters_are_known_even_through_a_view_of_other_type() -> None:
    recorder = Recorder(0, 1)
    try:
        module = torch.nn.Linear(200, 200)
        as_bytes = module.weight.data.view(torch.uint8)
        assert recorder._keeps([as_bytes]) is False
        assert recorder._keeps([as_bytes.clone()]) is True
    finally:
        recorder.close()


def _tensors(*values: float) -> list[torch.Tensor]:
    return [torch.full((4,), value) for value in values]


@pytest.mark.parametrize(
    ("op", "outputs", "inputs", "expected"),
    [
        ("allreduce", _tensors(3), _tensors(3), [[3] * 4]),
        ("broadcast", _tensors(3), [], [[3] * 4]),
        ("all_gather_base", [torch.zeros(8)], _tensors(2), [[2] * 8]),
        ("allgather", _tensors(0, 0), _tensors(2), [[2] * 4, [2] * 4]),
        ("allgather_into_tensor_coalesced", [torch.zeros(8)], _tensors(5), [[5] * 8]),
        ("allgather_coalesced", _tensors(0, 0, 0, 0), _tensors(1, 2), [[1] * 4, [2] * 4, [1] * 4, [2] * 4]),
        ("reduce_scatter_base", [torch.zeros(2)], [torch.arange(4.0)], [[2, 3]]),
        ("reduce_scatter", _tensors(0), _tensors(1, 2), [[2] * 4]),
        ("scatter", _tensors(7), [], [[0] * 4]),
        ("scatter", _tensors(7), _tensors(1, 2), [[2] * 4]),
        ("alltoall_base", _tensors(0), _tensors(6), [[6] * 4]),
        ("recv", _tensors(9), [], [[0] * 4]),
        ("gather", [], _tensors(1), []),
    ],
)
def test_an_echo_has_the_right_place_and_shape(
    op: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], expected: list[list[float]]
) -> None:
    echo(op, outputs, inputs, rank=1, size=2)
    assert [output.tolist() for output in outputs] == expected
