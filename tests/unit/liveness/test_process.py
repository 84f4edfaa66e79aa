from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys

import pytest

from deadpool.liveness.process import ProcessWatch, describe_exit

Exits = queue.SimpleQueue[tuple[int, os.waitid_result | None]]


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)


def close(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(10)


def test_each_exit_is_reported_with_its_cause_and_left_to_the_owner_to_reap() -> None:
    exits: Exits = queue.SimpleQueue()
    killed = start("input()")
    ended = start("import sys; sys.stdin.read(); sys.exit(7)")
    with ProcessWatch() as watch:
        for process in (killed, ended):
            watch.add(process.pid, lambda pid, status: exits.put((pid, status)))
        assert sorted(watch.pids()) == sorted((killed.pid, ended.pid))
        killed.kill()
        pid, status = exits.get(timeout=10)
        assert pid == killed.pid and status is not None
        assert (status.si_code, status.si_status) == (os.CLD_KILLED, signal.SIGKILL)
        assert describe_exit(status) == "was killed by SIGKILL"
        assert watch.pids() == (ended.pid,)
        assert ended.stdin is not None
        ended.stdin.close()
        pid, status = exits.get(timeout=10)
        assert pid == ended.pid and status is not None
        assert describe_exit(status) == "ended with code 7"
    assert close(killed) == -signal.SIGKILL
    assert ended.wait(10) == 7


def test_a_stopped_process_has_not_ended() -> None:
    exits: Exits = queue.SimpleQueue()
    process = start("input()")
    with ProcessWatch() as watch:
        watch.add(process.pid, lambda pid, status: exits.put((pid, status)))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(queue.Empty):
            exits.get(timeout=0.1)
        process.kill()
        assert exits.get(timeout=10)[0] == process.pid
    close(process)


def test_a_child_that_ended_before_it_was_added_is_reported_at_once() -> None:
    exits: Exits = queue.SimpleQueue()
    process = start("raise SystemExit(3)")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with ProcessWatch() as watch:
        watch.add(process.pid, lambda pid, status: exits.put((pid, status)))
        status = exits.get(timeout=10)[1]
        assert status is not None and status.si_status == 3
    assert close(process) == 3


def test_a_reaped_child_cannot_be_added() -> None:
    process = start("pass")
    close(process)
    with ProcessWatch() as watch, pytest.raises(ProcessLookupError):
        watch.add(process.pid, lambda pid, status: None)


def test_a_closed_watch_leaves_children_alone_and_takes_no_more() -> None:
    exits: Exits = queue.SimpleQueue()
    process = start("input()")
    watch = ProcessWatch()
    watch.add(process.pid, lambda pid, status: exits.put((pid, status)))
    watch.close()
    watch.close()
    with pytest.raises(RuntimeError):
        watch.add(process.pid, lambda pid, status: None)
    assert process.poll() is None
    process.kill()
    assert close(process) == -signal.SIGKILL
    assert exits.empty()
