"""What a rank leaves behind for `deadpool verify`: values per step, and digests of its raw state.

Files of the run folder, each written by one process at a time; listed in docs/report.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from deadpool.events import boottime_s


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Raw bytes of a tensor, whatever its dtype, in memory order of a contiguous copy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return b""
    return flat.view(torch.uint8).numpy().tobytes()


def digest(tensor: torch.Tensor) -> str:
    """sha256 of dtype, shape and raw bytes."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + tensor_bytes(tensor)).hexdigest()


class StepRecords:
    """Values that the user records in a step; they count only once the step's boundary is passed.

    Args:
        folder: `records` folder of the run, or None: values are checked for their kind and dropped.
        rank: logical rank; the file is `rank-<rank>.jsonl`.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._pending: list[dict[str, object]] = []
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / f"rank-{rank}.jsonl", "ab", buffering=0)  # noqa: SIM115 closed in close()

    def add(self, values: Mapping[str, object]) -> None:
        """Keep values of the step in progress. Tensors and numbers only."""
        for name, value in values.items():
            if not isinstance(value, torch.Tensor | int | float | bool):
                raise TypeError(
                    f"ft.record({name}=...) takes a tensor or a number, not {type(value).__name__}"
                )
            if self._file is None:
                continue  # nobody will read it: not even a copy is made
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            self._pending.append(
                {
                    "n": name,
                    "d": str(tensor.dtype).removeprefix("torch."),
                    "sh": list(tensor.shape),
                    "b": tensor_bytes(tensor).hex(),
                }
            )

    def commit(self, generation: int, step: int) -> None:
        """The boundary of `step` is passed: append its values."""
        if self._file is None or not self._pending:
            return
        who = {"p": os.getpid(), "t": boottime_s()}
        lines = [json.dumps({"g": generation, "s": step, **value, **who}) for value in self._pending]
        self._pending.clear()
        self._file.write(("\n".join(lines) + "\n").encode())

    def drop(self) -> None:
        """The step in progress was aborted."""
        self._pending.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
