"""Tensors of a rank's state, under the names that they have in a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One tensor of the state. `resolve` finds the live one: its local shard, never a DTensor."""

    name: str
    resolve: Callable[[], torch.Tensor]
    at_boundary: bool  # copied at the boundary, because a forward may write it
    ranks: tuple[int, ...] = ()  # ranks that hold the same bytes if all goes well; () = this one only


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedTensor:
    """A table that the constructor computes: not stored, and found out if something changes it."""

    name: str
    resolve: Callable[[], torch.Tensor]
    built: torch.Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        return self.resolve() is self.built and self.built._version == self.version
