"""Checkpoints: complete or not there."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from deadpool.core.types import Name
from deadpool.errors import Fenced, LayoutMismatch, ReplicaCorrupt, SnapshotError
from deadpool.store import checkpoint
from deadpool.store.checkpoint import Manifest, Shard

WORLD = 3
FIRST, SECOND, THIRD = (Name(step=step, generation=0) for step in (10, 20, 30))


def allow() -> None:
    """A lease that holds."""


def fence() -> None:
    raise Fenced("replaced")


def parts_of(name: Name, rank: int) -> dict[str, memoryview]:
    return {
        "blob": memoryview(f"blob of {name.step} of {rank}".encode()),
        "unique": memoryview(bytes([name.step + rank]) * ((2 << 20) + 17)),
    }


def write_shards(root: Path, name: Name, ranks: range = range(WORLD)) -> list[Shard]:
    return [
        checkpoint.write_shard(root, name, rank, parts_of(name, rank), check_lease=allow) for rank in ranks
    ]


def write_whole(root: Path, name: Name) -> Manifest:
    return checkpoint.write_manifest(
        root, name, write_shards(root, name), world_size=WORLD, check_lease=allow
    )


def read(root: Path, manifest: Manifest, rank: int) -> dict[str, bytes]:
    places: dict[str, bytearray] = {}

    def place(sizes: Mapping[str, int]) -> dict[str, memoryview]:
        places.update({part: bytearray(n_bytes) for part, n_bytes in sizes.items()})
        return {part: memoryview(content) for part, content in places.items()}

    checkpoint.read_shard(root, manifest, rank, place)
    return {part: bytes(content) for part, content in places.items()}


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = write_whole(tmp_path, FIRST)

    manifest = checkpoint.latest_complete(tmp_path)

    assert manifest == written
    assert manifest is not None
    assert (manifest.name, manifest.world_size) == (FIRST, WORLD)
    for rank in range(WORLD):
        expected = {part: bytes(view) for part, view in parts_of(FIRST, rank).items()}
        assert read(tmp_path, manifest, rank) == expected
    assert files_in(tmp_path) == {
        "step-10.g0/manifest.json",
        *(f"step-10.g0/rank-{rank}.shard" for rank in range(WORLD)),
    }


def test_nothing_is_complete_without_a_manifest(tmp_path: Path) -> None:
    assert checkpoint.latest_complete(tmp_path / "missing") is None
    write_whole(tmp_path, FIRST)
    write_shards(tmp_path, SECOND)
    latest = checkpoint.latest_complete(tmp_path)
    assert latest is not None
    assert latest.name == FIRST


WRITER = """
import sys
from pathlib import Path
from deadpool.core.types import Name
from deadpool.store import checkpoint

def await_kill():
    print("written", flush=True)
    sys.stdin.read()

name, parts = Name(step=int(sys.argv[2]), generation=0), {"unique": memoryview(bytes(1 << 20))}
checkpoint.write_shard(Path(sys.argv[1]), name, 2, parts, check_lease=await_kill)
"""


def limit_file_size() -> None:
    """In a child: the kernel itself lets a write fail, as a full disk would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))


def test_a_faulty_write_on_one_rank_never_makes_a_complete_checkpoint(tmp_path: Path) -> None:
    write_whole(tmp_path, FIRST)
    shards = write_shards(tmp_path, SECOND, range(2))
    failed = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), str(SECOND.step)],
        preexec_fn=limit_file_size,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert failed.returncode == 1
    assert "OSError: [Errno 27] File too large" in failed.stderr

    claimed = Shard(rank=2, file="rank-2.shard", n_bytes=1, checksum=1)
    for known, problem in (
        (shards, "one shard of each of 3 ranks"),
        ([*shards, claimed], "rank-2.shard is missing"),
    ):
        with pytest.raises(SnapshotError, match=problem):
            checkpoint.write_manifest(tmp_path, SECOND, known, world_size=WORLD, check_lease=allow)

    latest = checkpoint.latest_complete(tmp_path)
    assert latest is not None
    assert latest.name == FIRST
    assert files_in(tmp_path / "step-20.g0") == {"rank-0.shard", "rank-1.shard"}


def test_a_manifest_needs_every_rank_once(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, FIRST)
    for wrong in ([], shards[:2], shards[1:], [*shards, shards[0]]):
        with pytest.raises(SnapshotError, match="one shard of each of 3 ranks"):
            checkpoint.write_manifest(tmp_path, FIRST, wrong, world_size=WORLD, check_lease=allow)
    assert checkpoint.latest_complete(tmp_path) is None


def test_a_replaced_host_writes_nothing_that_counts(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, FIRST, range(2))
    with pytest.raises(Fenced):
        checkpoint.write_shard(tmp_path, FIRST, 2, parts_of(FIRST, 2), check_lease=fence)
    assert files_in(tmp_path) == {"step-10.g0/rank-0.shard", "step-10.g0/rank-1.shard"}

    shards += write_shards(tmp_path, FIRST, range(2, 3))
    with pytest.raises(Fenced):
        checkpoint.write_manifest(tmp_path, FIRST, shards, world_size=WORLD, check_lease=fence)
    assert checkpoint.latest_complete(tmp_path) is None


@pytest.mark.parametrize("damage", ["missing", "short", "long", "of another rank", "bit in the checksum"])
def test_a_checkpoint_with_a_damaged_shard_does_not_exist(tmp_path: Path, damage: str) -> None:
    write_whole(tmp_path, FIRST)
    write_whole(tmp_path, SECOND)
    path = tmp_path / "step-20.g0" / "rank-1.shard"
    content = bytearray(path.read_bytes())
    match damage:
        case "missing":
            path.unlink()
        case "short":
            path.write_bytes(content[:-1])
        case "long":
            path.write_bytes(content + b"x")
        case "of another rank":
            path.write_bytes((tmp_path / "step-20.g0" / "rank-0.shard").read_bytes())
        case _:
            content[-16] ^= 1
            path.write_bytes(content)

    latest = checkpoint.latest_complete(tmp_path)

    assert latest is not None
    assert latest.name == FIRST


@pytest.mark.parametrize("position", [0, 9, 30, 300, 1_500_000])
def test_a_flipped_bit_is_found_when_the_shard_is_read(tmp_path: Path, position: int) -> None:
    manifest = write_whole(tmp_path, FIRST)
    path = tmp_path / "step-10.g0" / "rank-1.shard"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)

    with pytest.raises((ReplicaCorrupt, LayoutMismatch)):
        read(tmp_path, manifest, 1)
    read(tmp_path, manifest, 0)


def test_a_manifest_that_cannot_be_read_does_not_count(tmp_path: Path) -> None:
    write_whole(tmp_path, FIRST)
    write_whole(tmp_path, SECOND)
    manifest = tmp_path / "step-20.g0" / "manifest.json"
    for content in (b"", manifest.read_bytes()[:-5], (tmp_path / "step-10.g0/manifest.json").read_bytes()):
        manifest.write_bytes(content)
        latest = checkpoint.latest_complete(tmp_path)
        assert latest is not None
        assert latest.name == FIRST


def test_the_newest_two_stay_and_the_last_complete_one_always(tmp_path: Path) -> None:
    write_shards(tmp_path, Name(step=5, generation=0), range(1))  # given up long ago
    for name in (FIRST, SECOND, THIRD):
        write_whole(tmp_path, name)
    write_shards(tmp_path, Name(step=40, generation=1), range(2))  # being written

    removed = checkpoint.prune(tmp_path)

    assert {folder.name for folder in removed} == {"step-5.g0", "step-10.g0"}
    assert [manifest.name for manifest in checkpoint.complete_manifests(tmp_path)] == [THIRD, SECOND]
    assert (tmp_path / "step-40.g1").is_dir()
    checkpoint.prune(tmp_path, keep=0)
    assert [manifest.name for manifest in checkpoint.complete_manifests(tmp_path)] == [THIRD]


def test_a_named_checkpoint_is_found_by_its_manifest_alone_and_only_a_newer_one_will_do_instead(
    tmp_path: Path,
) -> None:
    first, second, third = (Name(step=step, generation=1) for step in (5, 10, 15))
    manifest = write_whole(tmp_path, second)
    write_shards(tmp_path, third)  # no manifest
    for shard in (tmp_path / "step-10.g1").glob("*.shard"):
        shard.unlink()
    assert checkpoint.read_manifest(tmp_path, second) == manifest
    assert checkpoint.read_manifest(tmp_path, third) is None
    assert checkpoint.find_durable(tmp_path, first) == second
    assert checkpoint.find_durable(tmp_path, second) == second
    assert checkpoint.find_durable(tmp_path, third) is None


def test_without_a_complete_one_nothing_is_deleted(tmp_path: Path) -> None:
    write_shards(tmp_path, FIRST, range(2))
    assert checkpoint.prune(tmp_path) == ()
    assert len(files_in(tmp_path)) == 2


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in (FIRST, SECOND, THIRD):
        write_whole(tmp_path, name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-10.g0" / "notes.txt").write_text("mine")
    (tmp_path / "step-10.g0" / f"rank-1.shard.tmp-{'0' * 12}").write_text("of a writer that died")

    checkpoint.prune(tmp_path)

    assert files_in(tmp_path / "step-10.g0") == {"notes.txt"}
    assert (tmp_path / "notes").is_dir()


def test_a_writer_killed_before_its_rename_leaves_no_shard(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, FIRST, range(2))
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(FIRST.step)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)

    assert not (tmp_path / "step-10.g0" / "rank-2.shard").exists()
    shards += write_shards(tmp_path, FIRST, range(2, 3))
    checkpoint.write_manifest(tmp_path, FIRST, shards, world_size=WORLD, check_lease=allow)
