"""Is there room on this host for its own snapshots and the replicas it holds? Asked before anything is made.

The smallest of these decides: MemAvailable, every memory cgroup from this process's up to the root
(version 1 or 2), and the resource limits. A segment is shared memory: a cgroup charges it to whoever
touches a page first, which is the agent, and RLIMIT_FSIZE bounds its size.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadpool.errors import ConfigError
from deadpool.store.segment import SegmentKind, SegmentLayout

PROC = Path("/proc")

_NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as about 2**63; nothing near it is a real limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a host needs and has."""

    host: str
    needed_bytes: int
    available_bytes: int
    origin: str  # what sets available_bytes
    largest_segment_bytes: int = 0
    file_size_limit_bytes: int | None = None  # RLIMIT_FSIZE

    @property
    def problems(self) -> tuple[str, ...]:
        """What stands against it, in full sentences; () if there is room."""
        found = []
        if self.needed_bytes > self.available_bytes:
            found.append(
                f"host memory on {self.host}: {_human(self.needed_bytes)} needed for snapshots and replicas, "
                f"{_human(self.available_bytes)} available ({self.origin}); use more hosts, fewer ranks per "
                "host or a higher limit"
            )
        limit = self.file_size_limit_bytes
        if limit is not None and self.largest_segment_bytes > limit:
            found.append(
                f"host memory on {self.host}: one segment takes {_human(self.largest_segment_bytes)}, "
                f"RLIMIT_FSIZE allows {_human(limit)}; raise it with `ulimit -f unlimited`"
            )
        return tuple(found)

    def __str__(self) -> str:
        return (
            f"host memory on {self.host}: {_human(self.needed_bytes)} needed, "
            f"{_human(self.available_bytes)} available ({self.origin})"
        )


def needed_bytes(own: Sequence[SegmentLayout], held: Sequence[SegmentLayout]) -> int:
    """Memory of the segments of these ranks: both banks, header and write-once area."""
    return sum(layout.segment_bytes(SegmentKind.OWN) for layout in own) + sum(
        layout.segment_bytes(SegmentKind.HELD) for layout in held
    )


def check_memory(
    host: str,
    own: Sequence[SegmentLayout],
    held: Sequence[SegmentLayout],
    *,
    made_bytes: int = 0,
    proc: Path = PROC,
) -> MemoryReport:
    """Compare what the segments of this host take with what it has.

    Args:
        host: name for the message.
        own: one layout per rank of this host.
        held: one layout per rank that it holds replicas for.
        made_bytes: memory of segments that exist already, `HostMemoryStore.memory_bytes()`.
        proc: where procfs is mounted.

    Raises:
        ConfigError: it does not fit; the text has both numbers.
    """
    limits = memory_limits(proc)
    origin = min(limits, key=lambda key: limits[key])
    sizes = [layout.segment_bytes(SegmentKind.OWN) for layout in own]
    sizes += [layout.segment_bytes(SegmentKind.HELD) for layout in held]
    file_size_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    report = MemoryReport(
        host=host,
        needed_bytes=max(0, sum(sizes) - made_bytes),
        available_bytes=limits[origin],
        origin=origin,
        largest_segment_bytes=max(sizes, default=0),
        file_size_limit_bytes=None if file_size_limit == resource.RLIM_INFINITY else file_size_limit,
    )
    if report.problems:
        raise ConfigError(report.problems)
    return report


def available_bytes(proc: Path = PROC) -> int:
    """Memory that this process can still take."""
    return min(memory_limits(proc).values())


def memory_limits(proc: Path = PROC) -> Mapping[str, int]:
    """Bytes left under each limit, by its origin."""
    limits = {"MemAvailable": _meminfo_bytes(proc / "meminfo")}
    for folder in _cgroup_folders(proc):
        left = _cgroup_left_bytes(folder)
        if left is not None:
            limits[f"cgroup {folder}"] = left
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        used_pages = int((proc / "self" / "statm").read_text().split()[0])
        limits["RLIMIT_AS"] = max(0, address_space - used_pages * resource.getpagesize())
    return limits


def _meminfo_bytes(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError([f"{path} has no MemAvailable: Linux 3.14 or newer is needed"])


def _cgroup_folders(proc: Path) -> Iterator[Path]:
    """The memory cgroup of this process and its parents, as far as they are mounted here."""
    paths = dict(_cgroup_paths(proc / "self" / "cgroup"))
    for version, mount, root in _cgroup_mounts(proc / "self" / "mountinfo"):
        path = paths.get(version)
        if path is None:
            continue
        # In a container the mount may show only the subtree below `root`; a path outside it cannot be
        # seen, and then the mount point itself is the nearest that limits us.
        inside = path.relative_to(root) if path.is_relative_to(root) else Path()
        folder = mount / inside
        yield folder
        for parent in folder.parents:
            if not parent.is_relative_to(mount):
                break
            yield parent


def _cgroup_paths(path: Path) -> Iterator[tuple[int, Path]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield 2, Path(group)
        elif "memory" in controllers.split(","):
            yield 1, Path(group)


def _cgroup_mounts(path: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, mount point, root) of each mount that can hold memory limits. See proc(5), mountinfo."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        root, mount = Path(_unescape(fields[3])), Path(_unescape(fields[4]))
        if kind == "cgroup2":
            yield 2, mount, root
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, mount, root


def _cgroup_left_bytes(folder: Path) -> int | None:
    """Limit minus use, counting page cache that can be dropped as free; None if there is no limit."""
    for limit_file, usage_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            if limit == "max" or int(limit) >= _NO_LIMIT:
                return None
            used_bytes = int((folder / usage_file).read_text())
            counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except FileNotFoundError:
            continue
        return max(0, int(limit) - max(0, used_bytes - int(counters.get(cache_key, 0))))
    return None


def _unescape(field: str) -> str:
    """Mount points are written with octal escapes for spaces."""
    return field.encode().decode("unicode_escape")


def _human(n_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} bytes"
