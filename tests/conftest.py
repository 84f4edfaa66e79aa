"""What every test stands under: no skip passes unseen in CI, and nothing outlives its test."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

_MARK = "DEADPOOL_TEST_SESSION"
_ENDING_S = 5.0
"""How long threads, processes and descriptors may take to go after a test."""

_LASTING_THREADS = ("TMonitor", "tqdm")
"""Threads that a library starts once for the whole process."""

_LASTING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

_CHECKED_DESCRIPTORS = ("socket:", "/memfd:", "anon_inode:[pidfd]")
"""Kinds of descriptors that a test must close; libraries keep others (files, event queues) rightly."""


def pytest_configure(config: pytest.Config) -> None:
    # Inherited by every process that a test starts, however far down: this is how orphans are recognised.
    os.environ[_MARK] = uuid.uuid4().hex
    # A busy machine is no failure, and two runs try the same.
    settings.register_profile("deadpool", deadline=None, derandomize=True)
    settings.load_profile("deadpool")


def _is_forbidden_skip(nodeid: str) -> bool:
    return os.environ.get("DEADPOOL_NO_SKIP") == "1" and not nodeid.startswith("tests/gpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure where DEADPOOL_NO_SKIP=1 asks for it; an expected failure stays one."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _is_forbidden_skip(item.nodeid):
        report.outcome = "failed"
        report.longrepr = f"skipped although DEADPOOL_NO_SKIP=1: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself as a whole."""
    report = yield
    if report.skipped and _is_forbidden_skip(collector.nodeid):
        report.outcome = "failed"
        report.longrepr = f"skipped although DEADPOOL_NO_SKIP=1: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Fail a test that leaves a thread, a process, a socket or a memory file behind."""
    before = _inventory()
    yield
    deadline_s = time.monotonic() + _ENDING_S
    left = _inventory() - before
    while left and time.monotonic() < deadline_s:
        threading.Event().wait(0.02)
        left = _inventory() - before
    for kind, number, _what in left:
        if kind == "process":
            _kill(int(number))
    if left:
        lines = "\n".join(sorted(f"  {kind} {number} {what}" for kind, number, what in left))
        pytest.fail(f"left behind {_ENDING_S:g} s after the test:\n{lines}", pytrace=False)


def _inventory() -> set[tuple[str, str, str]]:
    return _threads() | _processes() | _descriptors()


def _threads() -> set[tuple[str, str, str]]:
    return {
        ("thread", str(thread.ident), thread.name)
        for thread in threading.enumerate()
        if thread.is_alive() and not thread.name.startswith(_LASTING_THREADS)
    }


def _processes() -> set[tuple[str, str, str]]:
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            # After the name, which may hold anything: state, parent. A child that was forked shows no mark.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended meanwhile, or belongs to somebody else
            continue
        ours = int(parent) == os.getpid() or mark in environment
        if ours and state != "Z" and not any(word in command for word in _LASTING_PROCESSES):
            found.add(("process", folder.name, command[:200]))
    return found


def _descriptors() -> set[tuple[str, str, str]]:
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:  # the descriptor of this very scan
            continue
        if target.startswith(_CHECKED_DESCRIPTORS):
            found.add(("descriptor", entry.name, target))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
