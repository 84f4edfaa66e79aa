"""Is there room? Against recorded files of real machines, laid out under tmp_path."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from deadpool.errors import ConfigError
from deadpool.store.memory_check import available_bytes, check_memory, memory_limits, needed_bytes
from deadpool.store.segment import SegmentKind, SegmentLayout

GIB = 1 << 30
LAYOUT = SegmentLayout(once_bytes=4096, blob_capacity=4096, unique_bytes=GIB, replicated_bytes=GIB)


class Machine:
    """A procfs and a cgroup mount below one folder."""

    def __init__(self, root: Path, *, available_gib: int = 100) -> None:
        self.proc = root / "proc"
        self.mount = root / "sys" / "fs" / "cgroup mount"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal:       263936000 kB\nMemFree:         1000000 kB\n"
            f"MemAvailable:   {available_gib << 20} kB\nBuffers: 1 kB\n"
        )
        (self.proc / "self" / "statm").write_text("1000 500 100 1 0 200 0\n")

    def set_group(self, lines: str, mountinfo: str) -> None:
        (self.proc / "self" / "cgroup").write_text(lines)
        mount = str(self.mount).replace(" ", "\\040")
        (self.proc / "self" / "mountinfo").write_text(mountinfo.replace("MOUNT", mount))

    def add_v2(self, path: str, limit: str, used: int, inactive_file: int = 0) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {inactive_file}\n")

    def add_v1(self, path: str, limit: int, used: int, inactive_file: int = 0) -> None:
        folder = self.mount / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


V2_MOUNTS = (
    "22 28 0:21 / /proc rw,nosuid - proc proc rw\n"
    "31 23 0:27 / MOUNT rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
)
V1_MOUNTS = (
    "35 31 0:32 / MOUNT/memory rw,relatime shared:3 - cgroup cgroup rw,memory\n"
    "36 31 0:33 / MOUNT/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
)
V1_GROUPS = "9:name=systemd:/\n4:memory:/slurm/job_7/step_0\n3:cpu,cpuacct:/other\n"


def test_without_cgroups_the_kernels_estimate_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_gib=12)
    assert memory_limits(machine.proc) == {"MemAvailable": 12 * GIB}


def test_a_limit_of_a_version_2_cgroup_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set_group("0::/slurm.slice/job_7\n", V2_MOUNTS)
    machine.add_v2("slurm.slice/job_7", str(20 * GIB), used=6 * GIB, inactive_file=GIB)
    machine.add_v2("slurm.slice", "max", used=90 * GIB)

    assert available_bytes(machine.proc) == 15 * GIB


def test_a_limit_of_a_parent_group_counts_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set_group("0::/slurm.slice/job_7\n", V2_MOUNTS)
    machine.add_v2("slurm.slice/job_7", "max", used=1 * GIB)
    machine.add_v2("slurm.slice", str(8 * GIB), used=5 * GIB)

    assert available_bytes(machine.proc) == 3 * GIB


def test_a_limit_of_a_version_1_cgroup_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set_group(V1_GROUPS, V1_MOUNTS)
    machine.add_v1("slurm/job_7/step_0", 9223372036854771712, used=5 * GIB)
    machine.add_v1("slurm/job_7", 10 * GIB, used=5 * GIB, inactive_file=2 * GIB)
    machine.add_v1("", 9223372036854771712, used=50 * GIB)

    limits = memory_limits(machine.proc)

    assert min(limits.values()) == 7 * GIB
    assert len(limits) == 2


def test_both_versions_may_be_mounted_at_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set_group(V1_GROUPS + "0::/\n", V1_MOUNTS + V2_MOUNTS.replace("MOUNT", "MOUNT/unified"))
    machine.add_v1("slurm/job_7/step_0", 4 * GIB, used=GIB)
    (machine.mount / "unified").mkdir(parents=True)

    assert available_bytes(machine.proc) == 3 * GIB


def test_a_container_that_sees_only_its_own_subtree_is_measured(tmp_path: Path) -> None:
    """No cgroup namespace: the group's path starts at the host's root, the mount at the container's."""
    machine = Machine(tmp_path)
    machine.set_group(
        "4:memory:/docker/abc/inner\n",
        V1_MOUNTS.replace(" / MOUNT/memory", " /docker/abc MOUNT/memory"),
    )
    machine.add_v1("inner", 6 * GIB, used=GIB)
    machine.add_v1("", 5 * GIB, used=GIB)
    assert available_bytes(machine.proc) == 4 * GIB

    machine.set_group(
        "4:memory:/docker/abc\n", V1_MOUNTS.replace(" / MOUNT/memory", " /docker/other MOUNT/memory")
    )
    assert available_bytes(machine.proc) == 4 * GIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set_group("0::/job\n", V2_MOUNTS)
    machine.add_v2("job", str(GIB), used=2 * GIB)
    assert available_bytes(machine.proc) == 0


def test_needed_counts_both_banks_of_own_and_held_segments() -> None:
    own, held = LAYOUT.segment_bytes(SegmentKind.OWN), LAYOUT.segment_bytes(SegmentKind.HELD)
    assert (own, held) == (4 * GIB + 4 * 4096, 2 * GIB + 4 * 4096)
    assert needed_bytes([LAYOUT, LAYOUT], [LAYOUT]) == 2 * own + held


def test_the_report_names_both_numbers(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_gib=10)
    report = check_memory("h0", [LAYOUT], [LAYOUT], proc=machine.proc)
    assert str(report) == "host memory on h0: 6.0 GiB needed, 10.0 GiB available (MemAvailable)"
    assert report.problems == ()


def test_too_little_memory_is_a_config_error_with_both_numbers(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_gib=10)
    machine.set_group("0::/job\n", V2_MOUNTS)
    machine.add_v2("job", str(4 * GIB), used=GIB)

    with pytest.raises(ConfigError) as raised:
        check_memory("h0", [LAYOUT], [LAYOUT], proc=machine.proc)

    (problem,) = raised.value.problems
    assert "host memory on h0: 6.0 GiB needed" in problem
    assert "3.0 GiB available (cgroup " in problem


def test_segments_that_exist_are_not_needed_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_gib=3)
    made = LAYOUT.segment_bytes(SegmentKind.OWN)
    report = check_memory("h0", [LAYOUT], [LAYOUT], made_bytes=made, proc=machine.proc)
    assert report.needed_bytes == LAYOUT.segment_bytes(SegmentKind.HELD)


def test_resource_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    limits = {resource.RLIMIT_AS: 5 * GIB + 1000 * resource.getpagesize(), resource.RLIMIT_FSIZE: 3 * GIB}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))

    with pytest.raises(ConfigError) as raised:
        check_memory("h0", [LAYOUT, LAYOUT], [], proc=machine.proc)

    assert len(raised.value.problems) == 2
    assert "5.0 GiB available (RLIMIT_AS)" in raised.value.problems[0]
    assert "one segment takes 4.0 GiB, RLIMIT_FSIZE allows 3.0 GiB" in raised.value.problems[1]


def test_this_machine_can_be_measured() -> None:
    assert available_bytes() > 0
