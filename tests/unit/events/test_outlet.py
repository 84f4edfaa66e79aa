"""Writes that hang hold nobody back for long, and none is lost or overtakes another."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool import outlet as outlet_module
from deadpool.events import EventLog
from deadpool.outlet import Outlet
from tests.unit.runtime.support import read_events, wait_until

WAIT_S = 20.0


@pytest.fixture
def outlet() -> Iterator[Outlet]:
    made = Outlet("test")
    yield made
    made.close()


class Hanging:
    """Something to write to that hangs until it is let go."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self._free = threading.Event()

    def write(self, number: int) -> None:
        assert self._free.wait(WAIT_S)
        self.written.append(number)

    def let_go(self) -> None:
        self._free.set()


def test_what_is_written_is_written_when_the_call_returns(outlet: Outlet) -> None:
    written: list[int] = []
    for number in range(100):
        outlet.do(lambda number=number: written.append(number))  # type: ignore[misc]
        assert written[-1] == number


def test_only_the_first_write_to_something_that_hangs_is_waited_for(
    outlet: Outlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet_module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(outlet_module, "MOST_WAITING", 1000)
    hanging = Hanging()
    for number in range(1500):  # waited for, each of them would take minutes
        outlet.do(lambda number=number: hanging.write(number))  # type: ignore[misc]
    assert hanging.written == []
    assert outlet.n_lost == 499  # the first one is being written, a thousand wait
    hanging.let_go()
    wait_until(lambda: len(hanging.written) == 1001, "what waited is written")
    assert hanging.written == sorted(hanging.written)
    outlet.do(lambda: hanging.write(2000))
    assert hanging.written[-1] == 2000  # and waited for again


def test_what_waits_is_written_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "PATIENCE_S", 0.2)
    outlet, hanging = Outlet("test"), Hanging()
    for number in range(3):
        outlet.do(lambda number=number: hanging.write(number))  # type: ignore[misc]
    closing = threading.Thread(target=outlet.close)
    closing.start()
    hanging.let_go()
    closing.join(WAIT_S)
    assert hanging.written == [0, 1, 2]
    outlet.do(lambda: hanging.write(3))
    assert hanging.written == [0, 1, 2]


def test_an_end_does_not_wait_for_what_hangs_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "PATIENCE_S", 0.1)
    monkeypatch.setattr(outlet_module, "CLOSE_S", 0.1)
    outlet, hanging = Outlet("test"), Hanging()
    outlet.do(lambda: hanging.write(0))
    outlet.close()
    assert hanging.written == []
    hanging.let_go()
    wait_until(lambda: hanging.written == [0], "the thread has ended")


def test_events_reach_the_file_and_the_console_once_their_readers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipes that nobody reads stand for a folder and a terminal that hang."""
    monkeypatch.setattr(outlet_module, "PATIENCE_S", 0.2)
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    read_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    shown = Hanging()
    log = EventLog(path, "run", "h0", strict=True, console=lambda line: shown.write(len(line)))
    count = 2000  # several times what a pipe holds
    for step in range(count):
        log.emit("snapshot.protected", step=step)
    shown.let_go()
    os.set_blocking(read_fd, True)
    closing = threading.Thread(target=log.close)
    closing.start()
    with open(read_fd, "rb") as file:
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(file.read())
    closing.join(WAIT_S)
    assert [event["step"] for event in read_events(copy)] == list(range(count))
    assert len(shown.written) == count
    assert log.lost_lines == 0


END = """
import os, sys
from pathlib import Path
from deadpool.events import EventLog
from deadpool.outlet import end_process
log = EventLog(None, "run", "h0", console=lambda line: print(line, file=sys.stderr, flush=True))
print("something that waits in a buffer")
for step in range(int(sys.argv[1])):
    log.emit("snapshot.protected", step=step)
log.close()
end_process(143)
"""


def end_with(output: int, count: int) -> int:
    """Exit code of a process that says so many lines into this descriptor and ends with 143."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", END, str(count)]
    return subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=50).returncode


def test_a_full_disk_behind_the_output_does_not_change_the_exit_code() -> None:
    with open("/dev/full", "wb") as full:
        assert end_with(full.fileno(), 3) == 143


def test_output_that_nobody_reads_does_not_keep_a_process_from_ending() -> None:
    read_fd, write_fd = os.pipe()
    try:
        assert end_with(write_fd, 5000) == 143  # several times what a pipe holds
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_a_write_that_fails_keeps_no_other_back(outlet: Outlet, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("closed")

    written: list[int] = []
    outlet.do(fail)
    outlet.do(lambda: written.append(1))
    assert written == [1]
    assert "a write of test failed" in caplog.text
