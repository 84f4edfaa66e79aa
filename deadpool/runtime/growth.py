"""Asks for another host when no spare is left: the leader's agent runs `--grow-command`."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
import time

from deadpool.core.growth import lacks_spare
from deadpool.core.membership import State
from deadpool.events import EventLog

logger = logging.getLogger(__name__)

RETRY_S = 60.0  # after a command that failed
JOIN_S = 120.0  # how long a host that was brought may take to register as a spare
STOP_S = 5.0


class Growth:
    """Runs the command, one at a time. On the agent's main thread.

    Args:
        command: a command line; "": never.
        has_spares: whether the job was started with spares.
        log: event log.
    """

    def __init__(self, command: str, has_spares: bool, log: EventLog) -> None:
        self._command = shlex.split(command)
        self._has_spares = has_spares
        self._log = log
        self._had_spare = False
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before_s = 0.0

    def tick(self, state: State) -> None:
        """Look at the leader's state; start the command if a spare is lacking."""
        if not self._command:
            return
        if self._process is not None:
            self._look_at(self._process)
            return
        if state.view is None:
            return  # who will be a spare is not decided yet
        # A new leader has not seen the spares of old: in a later generation one was used up.
        is_later = state.view.generation > 1 and self._has_spares
        self._had_spare = self._had_spare or bool(state.spares) or is_later
        if time.monotonic() >= self._not_before_s and lacks_spare(state, had_spare=self._had_spare):
            self._start()

    def close(self) -> None:
        """End a command that still waits: the job is over, or another agent leads."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        self._log.emit("growth.begin", command=" ".join(self._command))
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
            )
        except OSError as error:
            self._failed(str(error))

    def _look_at(self, process: subprocess.Popen[bytes]) -> None:
        code = process.poll()
        if code is None:
            return
        self._process = None
        if code == 0:
            self._log.emit("growth.done")
            self._not_before_s = time.monotonic() + JOIN_S
        else:
            self._failed(f"code {code}; see its output above")

    def _failed(self, why: str) -> None:
        self._log.emit("growth.failed", reason=why)
        self._not_before_s = time.monotonic() + RETRY_S
