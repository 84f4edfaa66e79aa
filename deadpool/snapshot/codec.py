"""Plain values <-> bytes, readable without pickle: msgpack with a few typed extensions.

Anything else is refused by the path under which it was found, because what cannot be read back without
running code cannot be trusted to come back the same on another host.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from deadpool.errors import ReplicaCorrupt

_TUPLE, _BIG_INT, _PAIRS, _TENSOR, _ARRAY, _SCALAR = 1, 2, 3, 4, 5, 6
_COUNTER, _ORDERED, _SET, _FROZEN_SET, _DTYPE, _DEVICE, _COMPLEX = 7, 8, 9, 10, 11, 12, 13

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1  # what msgpack holds; PCG64 states are 128 bits wide


class Unstorable(Exception):
    """A value that cannot be stored without pickle; the message names its path and type."""


def pack(value: object, path: str) -> bytes:
    """Encode `value`.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, tensors, numpy values.
        path: how to call the value in messages, as in `scheduler.state_dict()`.

    Raises:
        Unstorable: names the part that needs pickle.
    """
    return _ENCODER.encode(_lower(value, path))


def unpack(data: bytes | memoryview) -> Any:
    """Decode what `pack` wrote.

    Raises:
        ReplicaCorrupt: the bytes were not written by `pack`.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
        raise ReplicaCorrupt(f"blob of {len(data)} bytes cannot be read: {error}") from error


def find_unstorable(value: object, path: str) -> str | None:
    """The message that `pack` would raise, or None."""
    try:
        pack(value, path)
    except Unstorable as refusal:
        return str(refusal)
    return None


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The raw bytes of a tensor, row-major."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from_bytes(data: bytes | memoryview, dtype: str, shape: list[int]) -> torch.Tensor:
    """The inverse of `tensor_bytes`; owns its memory."""
    kind = _torch_dtype(dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def _lower(value: object, path: str) -> object:
    """Replace what msgpack does not know by extensions, depth first."""
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if isinstance(value, int) and kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else _ext(_BIG_INT, str(value))
    if kind is list:
        return [_lower(item, f"{path}[{index}]") for index, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]
    if isinstance(value, Mapping) and kind in (dict, Counter, OrderedDict):
        return _lower_mapping(value, path)
    if isinstance(value, tuple) and kind in (tuple, torch.Size):
        return _ext(_TUPLE, [_lower(item, f"{path}[{index}]") for index, item in enumerate(value)])
    if isinstance(value, torch.Tensor):
        return _lower_tensor(value, path)
    if isinstance(value, np.ndarray | np.generic):
        return _lower_array(value, path)
    if isinstance(value, set | frozenset) and kind in (set, frozenset):
        items = [_lower(item, f"{path}{{...}}") for item in value]
        return _ext(_SET if kind is set else _FROZEN_SET, items)
    if isinstance(value, torch.dtype):
        return _ext(_DTYPE, dtype_name(value))
    if isinstance(value, torch.device):
        return _ext(_DEVICE, str(value))
    if isinstance(value, complex) and kind is complex:
        return _ext(_COMPLEX, [value.real, value.imag])
    raise Unstorable(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without pickle; "
        "let state_dict() return plain values (numbers, text, bytes, lists, dicts, tensors, arrays)"
    )


def _lower_mapping(value: Mapping[Any, object], path: str) -> object:
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _lower(item, f"{path}[{key!r}]") for key, item in value.items()}
    pairs = [[_lower(key, f"{path} key"), _lower(item, f"{path}[{key!r}]")] for key, item in value.items()]
    if isinstance(value, Counter):
        return _ext(_COUNTER, pairs)
    return _ext(_ORDERED if isinstance(value, OrderedDict) else _PAIRS, pairs)


def _lower_tensor(value: torch.Tensor, path: str) -> object:
    if (
        type(value) not in (torch.Tensor, torch.nn.Parameter)
        or value.layout is not torch.strided
        or value.is_meta
    ):
        raise Unstorable(
            f"{path} is a {type(value).__qualname__} ({value.layout}, {value.device}), which cannot "
            "be stored without pickle; let state_dict() return a plain dense tensor"
        )
    return _ext(_TENSOR, [dtype_name(value.dtype), list(value.shape), str(value.device), tensor_bytes(value)])


def _lower_array(value: np.ndarray[Any, Any] | np.generic, path: str) -> object:
    if value.dtype.hasobject:
        raise Unstorable(f"{path} is a numpy array of Python objects, which cannot be stored without pickle")
    code = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
    array = np.ascontiguousarray(value)
    return _ext(code, [value.dtype.str, list(value.shape), array.tobytes()])


def _ext(code: int, content: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _ENCODER.encode(content))


def _raise_ext(code: int, data: memoryview) -> object:
    build = _BUILDERS.get(code)
    if build is None:
        raise ValueError(f"unknown extension {code}")
    return build(_DECODER.decode(data))


def _build_tensor(content: Any) -> torch.Tensor:
    dtype, shape, device, data = content
    tensor = tensor_from_bytes(data, dtype, shape)
    # A host without that device still reads the values; load_state_dict moves them where they belong.
    return tensor if device == "cpu" or not torch.cuda.is_available() else tensor.to(device)


def _build_array(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = content
    return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)


_BUILDERS: dict[int, Callable[[Any], object]] = {
    _TUPLE: tuple,
    _BIG_INT: int,
    _PAIRS: dict,
    _TENSOR: _build_tensor,
    _ARRAY: _build_array,
    _SCALAR: lambda content: _build_array(content)[()],
    _COUNTER: lambda pairs: Counter(dict(pairs)),
    _ORDERED: OrderedDict,
    _SET: set,
    _FROZEN_SET: frozenset,
    _DTYPE: _torch_dtype,
    _DEVICE: torch.device,
    _COMPLEX: lambda parts: complex(*parts),
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ext_hook=_raise_ext)
