"""Worker processes, seen from their agent."""

from __future__ import annotations

import os
import signal
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
