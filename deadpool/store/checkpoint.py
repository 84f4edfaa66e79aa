"""Snapshots on durable storage: the last resort, when every copy in memory is lost.

    <folder>/step-<s>.g<generation>/rank-<r>.shard    one per rank, written by its agent
    <folder>/step-<s>.g<generation>/manifest.json     written by the leader, last: it makes it complete

Each file is written under a temporary name, synced and renamed; just before the rename the caller's
`check_lease` may raise, so that a replaced host writes nothing that counts. A checkpoint without a
manifest, or whose shards do not match it, does not exist for `complete_manifests`. The folder is shared
by all hosts. A shard is read back without trust: its checksum is verified while it is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from deadpool.core.types import Name
from deadpool.errors import LayoutMismatch, ReplicaCorrupt, SnapshotError
from deadpool.store.checksum import RunningChecksum, chunk_digest, iterate_chunks

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2
FORMAT = 1

_FOLDER = re.compile(r"step-(\d+)\.g(\d+)")
_SHARD_FILE = re.compile(r"rank-\d+\.shard")
_TEMPORARY_FILE = re.compile(r"(rank-\d+\.shard|manifest\.json)\.tmp-[0-9a-f]+")
_MANIFEST_FILE = "manifest.json"
_MAGIC = b"DPSHARD1"
_HEAD = struct.Struct("<8sI")
_TAIL = struct.Struct("<Q8s")
_MAX_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's file, as the leader lists it."""

    rank: int
    file: str
    n_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint."""

    name: Name
    shards: tuple[Shard, ...]  # [world_size], in the order of ranks
    format: int = FORMAT

    @property
    def world_size(self) -> int:
        return len(self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardHeader:
    rank: int
    step: int
    generation: int
    parts: tuple[tuple[str, int], ...]  # (part, bytes) in the order of the file


Check = Callable[[], None]


def folder_of(root: Path, name: Name) -> Path:
    """Where the checkpoint of a name lives."""
    return root / f"step-{name.step}.g{name.generation}"


def write_shard(
    root: Path, name: Name, rank: int, parts: Mapping[str, memoryview], *, check_lease: Check
) -> Shard:
    """Write one rank's shard durably.

    Args:
        root: folder of all checkpoints of the job.
        name: snapshot that the parts are.
        rank: logical rank.
        parts: what to write, by the name under which `read_shard` returns it.
        check_lease: called just before the rename; raises if this host may write no more, or if the
            parts were overwritten while they were written.

    Raises:
        OSError: the storage failed; nothing that counts was written.
    """
    folder = folder_of(root, name)
    folder.mkdir(parents=True, exist_ok=True)
    file = f"rank-{rank}.shard"
    header = msgspec.json.encode(
        _ShardHeader(
            rank=rank,
            step=name.step,
            generation=name.generation,
            parts=tuple((part, len(view)) for part, view in parts.items()),
        )
    )
    checksum = RunningChecksum()
    checksum.add(chunk_digest(memoryview(header)))

    def write(stream: BinaryIO) -> None:
        stream.write(_HEAD.pack(_MAGIC, len(header)))
        stream.write(header)
        for view in parts.values():
            for _, chunk in iterate_chunks(view):
                checksum.add(chunk_digest(chunk))
                stream.write(chunk)
        stream.write(_TAIL.pack(checksum.value(), _MAGIC))

    _write_durably(folder / file, write, check_lease)
    n_bytes = _HEAD.size + len(header) + sum(len(view) for view in parts.values()) + _TAIL.size
    return Shard(rank=rank, file=file, n_bytes=n_bytes, checksum=checksum.value())


def write_manifest(
    root: Path, name: Name, shards: Sequence[Shard], *, world_size: int, check_lease: Check
) -> Manifest:
    """Make a checkpoint complete. For the leader, once every rank's shard is written.

    Args:
        root: folder of all checkpoints of the job.
        name: of the snapshot.
        shards: one per rank, as `write_shard` returned them on the ranks' hosts.
        world_size: ranks that must be there.
        check_lease: called just before the rename; raises if this host does not lead any more.

    Raises:
        SnapshotError: a shard is missing or not what its host wrote.
    """
    ordered = tuple(sorted(shards, key=lambda shard: shard.rank))
    if [shard.rank for shard in ordered] != list(range(world_size)):
        ranks = [shard.rank for shard in ordered]
        raise SnapshotError(
            f"checkpoint {name} needs one shard of each of {world_size} ranks, not of {ranks}"
        )
    manifest = Manifest(name=name, shards=ordered)
    problem = _problem_of(folder_of(root, name), manifest)
    if problem:
        raise SnapshotError(f"checkpoint {name} is not complete: {problem}; is {root} shared by all hosts?")
    content = msgspec.json.encode(manifest)
    _write_durably(
        folder_of(root, name) / _MANIFEST_FILE, lambda stream: _write_all(stream, content), check_lease
    )
    return manifest


def complete_manifests(root: Path) -> tuple[Manifest, ...]:
    """All complete checkpoints, newest first. One whose shards do not match its manifest is left out."""
    return tuple(_complete(root))


def latest_complete(root: Path) -> Manifest | None:
    """The newest complete checkpoint. Opens every shard of it, and of newer ones that are not complete."""
    return next(_complete(root), None)


def find_durable(root: Path, name: Name) -> Name | None:
    """The newest checkpoint with a manifest, which comes last, if it is `name` or newer. Opens no file."""
    newest = next((folder for folder in _newest_first(root) if (folder / _MANIFEST_FILE).is_file()), None)
    return _name_of(newest) if newest is not None and _name_of(newest) >= name else None


def read_manifest(root: Path, name: Name) -> Manifest | None:
    """The manifest of one checkpoint, None if there is none. Its shards are for `read_shard` to check."""
    return _decode_manifest(folder_of(root, name))


def _complete(root: Path) -> Iterator[Manifest]:
    return (found for folder in _newest_first(root) if (found := _read_manifest(folder)) is not None)


def _newest_first(root: Path) -> list[Path]:
    return sorted(_folders(root), key=_name_of, reverse=True)


def read_shard(
    root: Path,
    manifest: Manifest,
    rank: int,
    place: Callable[[Mapping[str, int]], Mapping[str, memoryview]],
) -> None:
    """Read one rank's shard into the views that `place` returns for the sizes of its parts.

    A part for which no view is returned is checked and skipped.

    Raises:
        ReplicaCorrupt: the file is not what was written.
        LayoutMismatch: a view has another size than its part.
    """
    shard = manifest.shards[rank]
    path = folder_of(root, manifest.name) / shard.file
    checksum = RunningChecksum()
    with path.open("rb", buffering=0) as stream:
        header = _read_header(stream, path, checksum)
        expected = (rank, manifest.name.step, manifest.name.generation)
        if (header.rank, header.step, header.generation) != expected:
            raise ReplicaCorrupt(f"{path} is the shard of rank {header.rank} step {header.step}")
        sizes = dict(header.parts)
        views = place(sizes)
        for part, n_bytes in header.parts:
            view = views.get(part)
            if view is None:
                view = memoryview(bytearray(n_bytes))
            if len(view) != n_bytes:
                raise LayoutMismatch(f"{path}: part {part} has {n_bytes} bytes, its place {len(view)}")
            for _, chunk in iterate_chunks(view):
                _read_exactly(stream, chunk, path)
                checksum.add(chunk_digest(chunk))
    if checksum.value() != shard.checksum:
        raise ReplicaCorrupt(f"{path} fails its checksum")


def prune(root: Path, *, keep: int = KEPT_CHECKPOINTS) -> tuple[Path, ...]:
    """Delete complete checkpoints beyond the newest `keep`, and incomplete ones older than those kept.

    The last complete one is never deleted, whatever `keep` says; nor is a file that is not ours.
    """
    complete = [manifest.name for manifest in complete_manifests(root)]
    kept = complete[: max(1, keep)]
    if not kept:
        return ()
    removed = []
    for folder in _folders(root):
        if _name_of(folder) not in kept and _name_of(folder) < kept[-1]:
            _remove(folder)
            removed.append(folder)
    return tuple(removed)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [entry for entry in root.iterdir() if _FOLDER.fullmatch(entry.name) and entry.is_dir()]


def _name_of(folder: Path) -> Name:
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None
    return Name(step=int(match[1]), generation=int(match[2]))


def _decode_manifest(folder: Path) -> Manifest | None:
    path = folder / _MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        logger.warning("checkpoint %s does not count: its manifest cannot be read: %s", folder, error)
        return None
    if manifest.name != _name_of(folder):
        logger.warning("checkpoint %s does not count: its manifest is of another step", folder)
        return None
    return manifest


def _read_manifest(folder: Path) -> Manifest | None:
    manifest = _decode_manifest(folder)
    if manifest is None:
        return None
    problem = _problem_of(folder, manifest)
    if problem:
        logger.warning("checkpoint %s does not count: %s", folder, problem)
        return None
    return manifest


def _problem_of(folder: Path, manifest: Manifest) -> str | None:
    """Compare the files' sizes and ends with the manifest: cheap, and finds torn and foreign ones."""
    if manifest.format != FORMAT:
        return f"format {manifest.format}, this version reads {FORMAT}"
    for shard in manifest.shards:
        path = folder / shard.file
        if _SHARD_FILE.fullmatch(shard.file) is None or not path.is_file():
            return f"{shard.file} is missing"
        if path.stat().st_size != shard.n_bytes:
            return f"{shard.file} has {path.stat().st_size} bytes instead of {shard.n_bytes}"
        with path.open("rb") as stream:
            stream.seek(-_TAIL.size, os.SEEK_END)
            if stream.read() != _TAIL.pack(shard.checksum, _MAGIC):
                return f"{shard.file} has another checksum"
    return None


def _read_header(stream: BinaryIO, path: Path, checksum: RunningChecksum) -> _ShardHeader:
    head = bytearray(_HEAD.size)
    _read_exactly(stream, memoryview(head), path)
    magic, header_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or header_bytes > _MAX_HEADER_BYTES:
        raise ReplicaCorrupt(f"{path} is no shard")
    header = bytearray(header_bytes)
    _read_exactly(stream, memoryview(header), path)
    checksum.add(chunk_digest(memoryview(header)))
    try:
        return msgspec.json.decode(bytes(header), type=_ShardHeader)
    except msgspec.DecodeError as error:
        raise ReplicaCorrupt(f"{path}: {error}") from error


def _read_exactly(stream: BinaryIO, view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        n_bytes = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not n_bytes:
            raise ReplicaCorrupt(f"{path} is too short")
        done += n_bytes


def _write_durably(path: Path, write: Callable[[BinaryIO], None], check_lease: Check) -> None:
    # Unique: a replaced host that still writes must not touch the file of the one that took over.
    temporary = path.with_name(f"{path.name}.tmp-{os.urandom(6).hex()}")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        check_lease()
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    for folder in (path.parent, path.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(stream: BinaryIO, content: bytes) -> None:
    stream.write(content)


def _remove(folder: Path) -> None:
    """Manifest first: a half-deleted checkpoint must not count."""
    (folder / _MANIFEST_FILE).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if _SHARD_FILE.fullmatch(entry.name) or _TEMPORARY_FILE.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        logger.warning("checkpoint folder %s holds foreign files and stays: %s", folder, error)
