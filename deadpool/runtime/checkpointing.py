"""The checkpoint tier: each host writes its shards, the leader writes the manifest last.

A shard is written from a private copy of its bank, in a thread of its own: slow storage never holds a bank,
and so never holds back a capture. The copy costs one snapshot of memory while it is written; so of a storage
that hangs, no more than two periodic checkpoints wait for it (deadpool/core/pace.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deadpool.core.pace import Pace, choose
from deadpool.core.types import Name
from deadpool.errors import ConfigError, LayoutMismatch, SnapshotError
from deadpool.events import EventLog
from deadpool.runtime.once import OnceArea
from deadpool.snapshot.layout import Layout
from deadpool.store.checkpoint import (
    Manifest,
    Shard,
    find_durable,
    latest_complete,
    prune,
    read_manifest,
    read_shard,
    write_manifest,
    write_shard,
)
from deadpool.store.host_memory import HostMemoryStore
from deadpool.store.segment import Segment, SegmentKind

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0  # of all writes together: the last checkpoint may still be on its way
LATE_JOIN_S = 1.0
FIND_S = 20.0  # 10,000 shards are opened in a few seconds
REPEAT_S = 5.0
DURABLE_S = 0.5  # a look at the folder's names
REPEATS = 4  # of the word that a shard is durable: the message, or the leader that heard it, may be lost

_MANIFEST, _LEFT_OUT = -1, -2  # in the place of a rank, among problems

Parts = dict[str, memoryview]  # of a shard, by name
Place = Callable[[Mapping[str, int]], dict[str, memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCallbacks:
    """What the tier says, on the agent's main thread, and asks."""

    written: Callable[[Name, Shard], None]  # a shard of this host is durable
    completed: Callable[[Name], None]  # this agent wrote the manifest
    may_write: Callable[[], bool]  # whether this host may still write (its lease holds); any thread


class CheckpointTier:
    """Writes and reads the checkpoints of a job. Methods are for the agent's main thread.

    Args:
        root: folder of all checkpoints of the job, shared by all hosts.
        store: host memory store, whose own banks are written.
        world_size: ranks of the job.
        log: event log.
        post: runs a function on the agent's main thread.
        callbacks: see CheckpointCallbacks.
    """

    def __init__(
        self,
        root: Path,
        store: HostMemoryStore,
        world_size: int,
        log: EventLog,
        *,
        post: Callable[..., None],
        callbacks: CheckpointCallbacks,
    ) -> None:
        self.root = root
        self.complete: Name | None = None  # newest manifest written or found here
        self.keeps_all = False  # delete nothing
        self._store = store
        self._world_size = world_size
        self._log = log
        self._post = post
        self._callbacks = callbacks
        self._begun: set[tuple[int, Name]] = set()
        self._writing: set[tuple[int, Name]] = set()
        self._pace = Pace()
        self._problems: dict[int, str] = {}  # rank -> why its newest shard is not in the folder
        self._searches: dict[str, threading.Thread] = {}  # the newest of each kind
        self._seen: Name | None = None  # the newest one with a manifest that a look has found
        self._shards: dict[Name, dict[int, Shard]] = {}
        self._being_completed: set[Name] = set()
        self._to_repeat: dict[int, tuple[Name, Shard, int]] = {}  # rank -> its newest shard, times left
        self._repeat_at_s = 0.0
        self._threads: list[threading.Thread] = []

    def tick(self) -> None:
        """Say again which shards are durable."""
        if not self._to_repeat or time.monotonic() < self._repeat_at_s:
            return
        self._repeat_at_s = time.monotonic() + REPEAT_S
        for rank, (name, shard, times) in list(self._to_repeat.items()):
            if times == 0 or (self.complete is not None and self.complete >= name):
                del self._to_repeat[rank]
                continue
            self._to_repeat[rank] = (name, shard, times - 1)
            self._callbacks.written(name, shard)

    @property
    def problems(self) -> tuple[str, ...]:
        """What keeps checkpoints from being complete, as far as this host knows."""
        return tuple(dict.fromkeys(self._problems.values()))

    def save_periodic(self, ranks: Sequence[int], name: Name, index: int) -> None:
        """`save`, unless the storage is so slow that the copies would fill the memory.

        Args:
            ranks: of this host.
            name: a committed step.
            index: number of the checkpoint, equal on all hosts.
        """
        waiting = sorted({each.step for _, each in self._writing})
        stride = self._pace.stride
        self._pace, is_written = choose(self._pace, index, len(waiting))
        if is_written:
            self.save(ranks, name)
        elif self._pace.stride != stride:
            steps = " and ".join(map(str, waiting))
            text = f"checkpoint of step {name.step} is left out, steps {steps} are still being written"
            self._fail(_LEFT_OUT, f"{text}; one in {self._pace.stride} is made from now on")

    def save(self, ranks: Sequence[int], name: Name) -> None:
        """Write the shards of `ranks` from the own banks that hold `name`; each at most once."""
        for rank in ranks:
            self._save(rank, name, partial(self._copy, rank, name))

    def save_held(self, ranks: Sequence[int], own_ranks: Sequence[int], name: Name) -> None:
        """Write the shards of ranks without an owner from the copies held here, if there are any.

        A held copy lacks what is replicated: that comes from the bank of an own rank in the same groups.
        """
        for rank in ranks:
            segment = self._store.held(rank)
            if segment is not None and segment.bank_of(name) is not None:
                self._save(rank, name, partial(self._copy_held, rank, tuple(own_ranks), name))

    def shard_written(self, name: Name, shard: Shard) -> bool:
        """Leader: a host wrote a shard. True once all are there and the manifest is being written."""
        if name in self._being_completed or (self.complete is not None and name <= self.complete):
            return False
        shards = self._shards.setdefault(name, {})
        shards[shard.rank] = shard
        if len(shards) < self._world_size:
            return False
        del self._shards[name]
        self._being_completed.add(name)
        self._start(lambda: self._write_manifest(name, list(shards.values())), "checkpoint-manifest")
        return True

    def is_durable(self, name: Name) -> bool:
        """Whether a complete checkpoint of `name`, or a newer one, is in the folder."""
        if self.complete is None or self.complete < name:
            self._search("checkpoint-durable", partial(self._look_for, name), DURABLE_S)
            if self._seen is not None and (self.complete is None or self._seen > self.complete):
                self.complete = self._seen
        return self.complete is not None and self.complete >= name

    def find(self) -> Name | None:
        """The newest complete checkpoint in the folder.

        Of a folder that hangs, the newest that is known here; `completed` is called if it answers later.

        Raises:
            SnapshotError: it does not answer, or cannot be read, and none is known here.
        """
        found: list[Name | None] = []
        problems: list[OSError] = []

        def look() -> None:
            try:
                manifest = latest_complete(self.root)
            except OSError as error:
                problems.append(error)
                return
            found.append(None if manifest is None else manifest.name)
            self._post(self._on_found, found[0])

        if self._search("checkpoint-find", look, FIND_S) and found:
            self.complete = found[0]
        elif self.complete is None:
            why = str(problems[0]) if problems else "it does not answer"
            raise SnapshotError(f"{self.root} cannot be searched for checkpoints: {why}")
        return self.complete

    def _on_found(self, name: Name | None) -> None:
        if name is not None and (self.complete is None or name > self.complete):
            self._note_complete(name)

    def load(self, rank: int, name: Name, segment: Segment, bank: int, once: OnceArea) -> int:
        """Read a rank's shard into a bank that was begun; returns the blob's length. Any thread.

        Raises:
            LayoutMismatch: the checkpoint was made by a script with another state.
            SnapshotError: the checkpoint cannot be read.
        """
        stored = OnceArea.decode(self.read_once(rank, name))
        if stored.layout_hash != once.layout_hash:
            raise LayoutMismatch(
                f"{_difference(stored, once)}\n"
                f"The checkpoint in {self.root} holds another state than this script builds (rank {rank}); "
                "give another --checkpoint-dir, or run the script that made it."
            )
        sizes: dict[str, int] = {}

        def place(parts: Mapping[str, int]) -> dict[str, memoryview]:
            sizes.update(parts)
            return {
                "blob": segment.blob_view(bank)[: parts["blob"]],
                "unique": segment.unique_view(bank),
                "replicated": segment.replicated_view(bank),
            }

        self._read(name, rank, place)
        return sizes["blob"]

    def read_once(self, rank: int, name: Name) -> bytes:
        """The write-once area that was saved with a rank's shard."""
        found = bytearray()

        def place(parts: Mapping[str, int]) -> dict[str, memoryview]:
            found.extend(bytes(parts["once"]))
            return {"once": memoryview(found)}

        self._read(name, rank, place)
        return bytes(found)

    def close(self, *, is_late: bool = False) -> None:
        """Let what is being written be finished, for JOIN_TIMEOUT_S at most; if `is_late`, a moment."""
        deadline_s = time.monotonic() + (LATE_JOIN_S if is_late else JOIN_TIMEOUT_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _manifest(self, name: Name) -> Manifest:
        manifest = read_manifest(self.root, name)
        if manifest is None:
            raise SnapshotError(f"the checkpoint of step {name.step} in {self.root} is not complete")
        return manifest

    def _read(self, name: Name, rank: int, place: Place) -> None:
        try:
            read_shard(self.root, self._manifest(name), rank, place)
        except OSError as error:
            raise SnapshotError(f"the shard of rank {rank} in {self.root} cannot be read: {error}") from error

    def _look_for(self, name: Name) -> None:
        """Thread: an answer that comes late is found by the next `is_durable`."""
        try:
            self._seen = find_durable(self.root, name) or self._seen
        except OSError as error:
            logger.warning("%s cannot be looked at: %s", self.root, error)

    def _search(self, name: str, look: Callable[[], None], limit_s: float) -> bool:
        """Let a thread look into the folder; False if it takes longer, or the one before still hangs."""
        before = self._searches.get(name)
        if before is not None and before.is_alive():
            return False
        self._searches[name] = self._start(look, name)
        self._searches[name].join(limit_s)
        return not self._searches[name].is_alive()

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _save(self, rank: int, name: Name, copy: Callable[[], Parts]) -> None:
        if (rank, name) not in self._begun:
            self._begun.add((rank, name))
            self._writing.add((rank, name))
            self._start(partial(self._write, rank, name, copy), f"checkpoint-{rank}")

    def _write(self, rank: int, name: Name, copy: Callable[[], Parts]) -> None:
        try:
            parts = copy()
            shard = write_shard(self.root, name, rank, parts, check_lease=self._check)
        except (SnapshotError, OSError, MemoryError) as error:
            self._post(self._on_not_written, rank, name, str(error) or repr(error))
            return
        self._log.emit("checkpoint.written", rank=rank, step=name.step, bytes=shard.n_bytes)
        self._post(self._on_written, name, shard)

    def _on_not_written(self, rank: int, name: Name, why: str) -> None:
        self._writing.discard((rank, name))
        self._begun.discard((rank, name))  # it may be tried again
        self._fail(rank, f"checkpoint of step {name.step} was not written by rank {rank}: {why}")

    def _on_written(self, name: Name, shard: Shard) -> None:
        self._writing.discard((shard.rank, name))
        for each in (shard.rank, _MANIFEST):
            self._problems.pop(each, None)
        if self._pace.stride == 1:
            self._problems.pop(_LEFT_OUT, None)
        self._to_repeat[shard.rank] = (name, shard, REPEATS)
        self._repeat_at_s = time.monotonic() + REPEAT_S
        self._callbacks.written(name, shard)

    def _copy(self, rank: int, name: Name, kind: SegmentKind = SegmentKind.OWN) -> Parts:
        """A private copy of a bank, taken while nobody may overwrite it."""
        with self._store.read(rank, name, kind=kind) as reader:
            segment, bank = reader.segment, reader.bank
            assert bank is not None
            parts = {
                "once": memoryview(bytes(segment.once_view()[: segment.once_len])),
                "blob": memoryview(bytes(segment.blob_view(bank)[: reader.info.blob_len])),
                "unique": memoryview(bytes(segment.unique_view(bank))),
            }
            if kind is SegmentKind.OWN:
                parts["replicated"] = memoryview(bytes(segment.replicated_view(bank)))
            reader.finish()
            return parts

    def _copy_held(self, rank: int, own_ranks: tuple[int, ...], name: Name) -> Parts:
        """What `_copy` returns, for a rank whose owner is lost."""
        parts = self._copy(rank, name, SegmentKind.HELD)
        once = OnceArea.decode(bytes(parts["once"]))
        replicated = bytearray(once.replicated_bytes)
        for ranks, start, n_bytes in once.spans:
            source = next((each for each in own_ranks if each in ranks), None)
            if source is None:
                raise SnapshotError(f"no own rank has what ranks {ranks} replicate")
            own = self._copy(source, name)
            spans = {tuple(ranks): begin for ranks, begin, _ in OnceArea.decode(bytes(own["once"])).spans}
            begin = spans[tuple(ranks)]
            replicated[start : start + n_bytes] = own["replicated"][begin : begin + n_bytes]
        return {**parts, "replicated": memoryview(replicated)}

    def _write_manifest(self, name: Name, shards: Sequence[Shard]) -> None:
        try:
            write_manifest(self.root, name, shards, world_size=self._world_size, check_lease=self._check)
            if not self.keeps_all:
                prune(self.root)
        except (SnapshotError, OSError) as error:
            self._post(self._on_not_complete, name, str(error))
            return
        self._log.emit("checkpoint.complete", step=name.step, path=str(self.root))
        self._post(self._note_complete, name)

    def _on_not_complete(self, name: Name, why: str) -> None:
        self._being_completed.discard(name)
        self._fail(_MANIFEST, f"checkpoint of step {name.step} is not complete: {why}")

    def _fail(self, rank: int, problem: str) -> None:
        self._problems[rank] = problem
        logger.warning("%s", problem)

    def _note_complete(self, name: Name) -> None:
        self.complete = name
        self._being_completed.discard(name)
        self._problems.pop(_MANIFEST, None)
        self._begun = {(rank, begun) for rank, begun in self._begun if begun > name}
        self._shards = {begun: shards for begun, shards in self._shards.items() if begun > name}
        self._callbacks.completed(name)

    def _check(self) -> None:
        if not self._callbacks.may_write():
            raise SnapshotError("this host's lease has run out: it may write no more")


def checkpoint_root(directory: str, run_dir: Path) -> Path:
    """Where checkpoints go: the configured folder, or one in the run folder for the last resort.

    Raises:
        ConfigError: the configured folder cannot be made.
    """
    root = Path(directory).absolute() if directory else run_dir / "checkpoints"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"checkpoint folder {root} cannot be made: {error.strerror}"]) from error
    return root


def _difference(stored: OnceArea, once: OnceArea) -> str:
    try:
        Layout.from_json(once.layout).check_same(Layout.from_json(stored.layout))
    except LayoutMismatch as error:
        return str(error)
    return "the layouts differ in their encoding"
