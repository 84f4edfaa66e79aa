"""Worker processes of one host: start, output, close channel, page, kill and reap.

Everything is created by the agent before the worker starts, and inherited: there is no socket file, no
port and no shared-memory name that a killed run could leave behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from deadpool.communicator.nccl_environment import NCCL_ENVIRONMENT
from deadpool.config import Config, hide_secrets
from deadpool.liveness.progress import WorkerPage
from deadpool.runtime.ipc import Channel, ChannelClosed, ReaderThread
from deadpool.runtime.messages import AgentToWorker, WorkerToAgent
from deadpool.runtime.worker import ENVIRONMENT

_CLOSE_FRAME = struct.Struct("<QQ")
_CLOSE = 1
_CLOSED = 2
OUTPUT_JOIN_S = 2.0
SEND_TIMEOUT_S = 2
PARKED_RANK = -1


class WorkerHandle:
    """One worker process, seen from its agent.

    Args:
        local_rank: index among the workers of this host.
        config: configuration of the job, handed over.
        run_dir: folder of the run, handed over.
        deliver: called from the reader thread with (this, message).
        closed: called from the close thread with (this, generation) once all handles are closed.
    """

    def __init__(
        self,
        local_rank: int,
        config: Config,
        run_dir: Path,
        deliver: Callable[[WorkerHandle, WorkerToAgent], None],
        closed: Callable[[WorkerHandle, int], None],
    ) -> None:
        self.local_rank = local_rank
        self.rank = PARKED_RANK
        self.page = WorkerPage.create(f"deadpool-page-{local_rank}")
        self._closed_callback = closed
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))
        self._close_socket, close_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handover = {
            "message_fd": theirs.fileno(),
            "close_fd": close_theirs.fileno(),
            "page_fd": self.page.fd,
            "parent": os.getpid(),
            "config": config.without_secrets().to_bytes().hex(),
            "run_dir": str(run_dir),
        }
        environment = hide_secrets(os.environ)
        environment[ENVIRONMENT] = json.dumps(handover)
        for name, value in NCCL_ENVIRONMENT.items():
            environment.setdefault(name, value)  # what the user has set is checked in the worker
        environment.setdefault("PYTHONUNBUFFERED", "1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deadpool.runtime.worker_main"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(theirs.fileno(), close_theirs.fileno(), self.page.fd),
            process_group=0,  # what the script starts ends with it
        )
        theirs.close()
        close_theirs.close()
        self.channel: Channel[WorkerToAgent] = Channel(mine, WorkerToAgent)
        self._reader = ReaderThread(
            self.channel, lambda message: deliver(self, message), lambda why: None, f"worker-{self.pid}"
        )
        self._output = threading.Thread(target=self._copy_output, name=f"output-{self.pid}", daemon=True)
        self._closer = threading.Thread(target=self._read_closed, name=f"close-{self.pid}", daemon=True)
        self._reader.start()
        self._output.start()
        self._closer.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_parked(self) -> bool:
        return self.rank == PARKED_RANK

    def send(self, message: AgentToWorker, fds: tuple[int, ...] = ()) -> None:
        """Send a message; a worker that is gone is noticed by the process watch, not here.

        One that does not read for SEND_TIMEOUT_S is stopped or stuck: it is killed, and noticed so, too.
        """
        try:
            self.channel.send(message, fds)
        except ChannelClosed as error:
            if isinstance(error.__cause__, BlockingIOError):
                self.kill()

    def close_handles(self, generation: int) -> None:
        """Tell the native listener to close every handle of generations up to `generation`."""
        try:
            self._close_socket.send(_CLOSE_FRAME.pack(_CLOSE, generation), socket.MSG_DONTWAIT)
        except OSError:
            pass  # gone, or stopped with a full buffer: the limits decide

    def kill(self) -> None:
        """SIGKILL the worker and what it has started, data workers for instance; also when it is stopped."""
        if self.process.returncode is None:  # not reaped: until then nobody else gets its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self, timeout_s: float) -> bool:
        """Wait for a process that was killed or has ended, and release what it used.

        What it started is killed, too: data workers that outlive their trainer would hold its output open.

        Returns:
            False if it is still there.
        """
        self.kill()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._output.join(OUTPUT_JOIN_S)
        self.channel.close()
        try:
            self._close_socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer is gone already
        self._closer.join(OUTPUT_JOIN_S)
        self._reader.join(OUTPUT_JOIN_S)
        self._close_socket.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.page.close()
        return True

    def _read_closed(self) -> None:
        while True:
            try:
                frame = self._close_socket.recv(_CLOSE_FRAME.size)
            except OSError:
                return
            if len(frame) < _CLOSE_FRAME.size:
                return
            kind, generation = _CLOSE_FRAME.unpack(frame)
            if kind == _CLOSED:
                self._closed_callback(self, generation)

    def _copy_output(self) -> None:
        """Copy the worker's output to ours, each line marked with its rank."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        at_line_start = True
        while True:
            try:
                data = os.read(descriptor, 65536)
            except OSError:
                return
            if not data:
                return
            text = data.decode(errors="replace")
            mark = f"[rank {self.rank}] " if not self.is_parked else "[spare] "
            marked = text.replace("\n", f"\n{mark}")
            if at_line_start:
                marked = mark + marked
            at_line_start = text.endswith("\n")
            if at_line_start:
                marked = marked.removesuffix(mark)
            with contextlib.suppress(OSError):  # nobody reads, or the disk is full: the worker must not block
                sys.stdout.write(marked)
                sys.stdout.flush()
