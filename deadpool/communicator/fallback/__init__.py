"""The native part in Python, for an installation without a compiler: same names as `_native.pyi`, gloo only.

What it does worse, and what not at all, is a table in docs/fallback.md; each line of it has a test that is
expected to fail. The main one: an abort waits for the GIL.

    process.py   sockets, worker page, the thread that hears the agent
    registry.py  generations, builds, closing
    group.py     handles
    work.py      what their calls return
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import Work

from deadpool.communicator.fallback.group import SwapBackend
from deadpool.communicator.fallback.process import Listener, name_hash, page
from deadpool.communicator.fallback.registry import Build, registry
from deadpool.communicator.fallback.work import DoneWork, WatchedWork

__all__ = [
    "Build",
    "SwapBackend",
    "add_store_socket",
    "clear_entries",
    "close",
    "closed_generation",
    "done_work",
    "free_nccl",
    "handles",
    "is_closed",
    "is_listening",
    "map_page",
    "name_hash",
    "open",
    "opened_generation",
    "reap",
    "remove_store_socket",
    "reset_generations",
    "start_listener",
    "stop_listener",
    "watch_work",
]

_listener = Listener(registry.close, registry.fail_blocked)

open = registry.open
closed_generation = registry.closed_generation
opened_generation = registry.opened_generation
is_closed = registry.is_closed
reap = registry.reap
reset_generations = registry.reset_generations
add_store_socket = registry.add_store_socket
remove_store_socket = registry.remove_store_socket
map_page = page.map
clear_entries = page.clear_entries
start_listener = _listener.start
stop_listener = _listener.stop
is_listening = _listener.is_running


def close(generation: int) -> None:
    """Close every handle of generations up to `generation`; see Registry.close."""
    registry.close(generation)
    registry.fail_blocked(generation)


def free_nccl() -> None:
    """There is no NCCL here."""


def handles() -> list[SwapBackend]:
    """Handles that are alive and not shut down, in order of creation."""
    return [handle for handle in registry.handles() if isinstance(handle, SwapBackend)]


def watch_work(work: Work, done: Callable[[int], None]) -> Work:
    """A work that calls `done(source rank)` once, after `work` succeeded and before its waiter goes on."""
    return WatchedWork(work, done)


def done_work(outputs: Sequence[torch.Tensor], source_rank: int = -1) -> Work:
    """A work that is complete from the start."""
    return DoneWork(outputs, source_rank)
