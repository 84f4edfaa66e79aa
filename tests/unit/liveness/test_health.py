from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from deadpool.liveness.health import check_clocks, check_health, check_kernel, check_memory
from deadpool.liveness.pause import PauseMeter


def test_this_machine_is_healthy() -> None:
    report = check_health(test_bytes=4 << 20)
    assert report.problems == ()
    assert report.is_healthy
    assert 0 < report.seconds < 10


def test_single_checks_pass_here() -> None:
    assert check_memory(1) is None
    assert check_memory(5 << 20) is None
    assert check_clocks() is None
    assert check_kernel() is None


def test_memory_that_cannot_be_had_is_a_problem_with_its_size() -> None:
    code = (
        "import resource; from deadpool.liveness.health import check_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "print(check_memory(4 << 30))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert "memory: 4096 MiB cannot be had" in done.stdout


def test_a_host_without_descriptors_left_is_not_healthy() -> None:
    code = (
        "import os, resource; from deadpool.liveness.health import check_health\n"
        "while True:\n"
        "    try:\n"
        "        os.dup(0)\n"
        "    except OSError:\n"
        "        break\n"
        "print(check_health(1 << 20).problems)\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, preexec_fn=limit
    )
    assert "memfd_create fails" in done.stdout
    assert "pidfd_open fails" in done.stdout


def test_a_pause_is_what_a_loop_is_late_beyond_one_interval() -> None:
    meter = PauseMeter(0.25)
    assert meter.tick(10.0) == 0.0
    assert meter.tick(10.25) == 0.0
    assert meter.tick(10.74) == 0.0
    assert meter.tick(20.99) == pytest.approx(10.0)
    assert meter.tick(21.24) == 0.0
