"""Worker processes, seen from their agent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from deadpool.config import Config
from deadpool.runtime.messages import Exit
from deadpool.runtime.processes import WorkerHandle
from tests.unit.runtime.support import WAIT_S


def _ignore(*_: object) -> None:
    pass


def test_a_stopped_worker_that_reads_nothing_is_killed_and_holds_nobody_up(tmp_path: Path) -> None:
    handle = WorkerHandle(0, Config(), tmp_path, _ignore, _ignore)
    try:
        os.kill(handle.pid, signal.SIGSTOP)
        handle.send(Exit(code=1, reason="x" * (4 << 20)))
        assert handle.process.wait(WAIT_S) == -signal.SIGKILL
    finally:
        handle.kill()
        assert handle.reap(WAIT_S)


def test_what_a_worker_has_started_is_killed_with_it(tmp_path: Path) -> None:
    handle = WorkerHandle(0, Config(), tmp_path, _ignore, _ignore)
    helper = subprocess.Popen(["sleep", "60"], process_group=handle.pid)  # as if the script had started it
    try:
        handle.kill()
        assert helper.wait(WAIT_S) == -signal.SIGKILL
    finally:
        helper.kill()
        assert handle.reap(WAIT_S)


FORKS = """
import os, sys, threading, time
from deadpool.runtime.worker import bind_forked_children

bind_forked_children()
def fork():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
    print(pid, flush=True)
if sys.argv[1] == "main thread":
    fork()
else:
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
time.sleep(60)
"""


def test_a_forked_data_worker_dies_with_its_trainer_whoever_killed_it() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKS, "main thread"], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        child = os.pidfd_open(int(trainer.stdout.readline()))
        trainer.kill()
    try:
        assert select.select([child], [], [], WAIT_S)[0], "the child lives on"
    finally:
        os.close(child)


def test_a_child_that_a_short_thread_forked_outlives_that_thread() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKS, "thread"], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        child = os.pidfd_open(pid)
        try:
            assert not select.select([child], [], [], 0.5)[0], "the child was killed with the thread"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.close(child)
            trainer.kill()
