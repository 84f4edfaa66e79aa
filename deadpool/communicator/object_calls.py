"""Object collectives, seen at their own level while a constructor phase is recorded or replayed.

Two reasons: all their payloads belong into the record whatever their size, and the source of a
broadcast_object_list never deserialises what it sends, so a spare that replays the source would keep its
own objects instead of the recorded.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed

_NAMES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)

_scope = threading.local()


class ObjectSource(Protocol):
    """Who records or replays broadcasts that this rank sends."""

    def object_broadcast(self, group: str, objects: list[Any], run: Callable[[], None]) -> None:
        """Do `run`, or put the recorded objects into `objects` instead."""


def is_inside() -> bool:
    """This thread is inside an object collective."""
    return getattr(_scope, "depth", 0) > 0


def wrapped(source: ObjectSource) -> dict[str, Callable[..., Any]]:
    """Replacements for the object collectives of torch.distributed, by name."""
    found = {name: _scoped(getattr(distributed, name)) for name in _NAMES}
    stock = found["broadcast_object_list"]

    @functools.wraps(distributed.broadcast_object_list)
    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        def run() -> None:
            stock(object_list, src=src, group=group, device=device, group_src=group_src)

        name = _group_sent_by_us(group, src, group_src)
        if name is None:
            run()
        else:
            source.object_broadcast(name, object_list, run)

    found["broadcast_object_list"] = broadcast_object_list
    return found


def pickle_objects(objects: list[Any]) -> bytes:
    """The objects as a spare will see them; what torch's own collectives accept is picklable."""
    return pickle.dumps(list(objects))


def _scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _scope.depth = getattr(_scope, "depth", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _scope.depth -= 1

    return call


def _group_sent_by_us(group: dist.ProcessGroup | None, src: int | None, group_src: int | None) -> str | None:
    """Name of the group if this rank is the source of the broadcast, else None."""
    if distributed._rank_not_in_group(group):
        return None
    actual = distributed._group_or_default_group(group)
    if group_src is None:
        group_src = dist.get_group_rank(actual, 0 if src is None else src)
    return str(actual.group_name) if actual.rank() == group_src else None
