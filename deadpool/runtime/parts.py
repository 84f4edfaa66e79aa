"""The parts of one host that its drivers share, and what a generation begins from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deadpool.config import Config
from deadpool.core.types import Name, View
from deadpool.events import EventLog
from deadpool.membership.registry import Registry
from deadpool.runtime.checkpointing import CheckpointTier
from deadpool.runtime.fetch import Fetcher
from deadpool.runtime.protection import Protection
from deadpool.runtime.workforce import Workforce
from deadpool.runtime.writer import RegistryWriter
from deadpool.store.data_server import DataServer
from deadpool.store.host_memory import HostMemoryStore


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """Made by the agent; used by `Host` and its helpers on the agent's main thread."""

    config: Config
    run_dir: Path
    registry: Registry
    writer: RegistryWriter
    store: HostMemoryStore
    server: DataServer
    workforce: Workforce
    protection: Protection
    fetcher: Fetcher
    checkpoints: CheckpointTier
    log: EventLog
    stop_streams: Callable[[int], None]  # every push of an older generation ends


def first_name(view: View) -> Name:
    """The snapshot that a generation begins from: what it rolled back to, or its own snapshot 0."""
    return view.rollback or Name(step=0, generation=view.generation)
