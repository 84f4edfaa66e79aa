"""The training process: boots, parks, runs the user's script as the rank that its agent assigns.

Started by the agent as `python -m deadpool.runtime.worker_main`; three inherited descriptors (message socket,
close channel, worker page) are named in DEADPOOL_WORKER. The main thread runs the script; one thread reads
messages. No etcd client and no gRPC here: forked data-loader workers crash with gRPC.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import queue
import random
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from deadpool import __version__
from deadpool.config import Config
from deadpool.errors import DeadPoolError, ExitCode
from deadpool.runtime.ipc import Channel, ReaderThread
from deadpool.runtime.messages import (
    AgentToWorker,
    Assign,
    CaptureStep,
    Exit,
    Raised,
    Ready,
    Refused,
    Rehearsed,
    WithdrawStep,
    WorkerToAgent,
)

ENVIRONMENT = "DEADPOOL_WORKER"
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # here and not in a forked child, where loading can deadlock

_current: WorkerProcess | None = None


class BuildDiscarded(BaseException):
    """Unwinds the script at `wrap` during a throw-away build. Not an error: user code must not catch it."""


def current_worker() -> WorkerProcess | None:
    """The worker of this process, or None when the script was not started by `deadpool run`."""
    return _current


class WorkerProcess:
    """One worker: its channel to the agent, and the assignment it runs under.

    Args:
        channel: message channel to the agent.
        close_fd: native close channel.
        page_fd: worker page.
        config: configuration of the job.
        run_dir: folder of the run (records, digests, injections).
    """

    def __init__(
        self, channel: Channel[AgentToWorker], close_fd: int, page_fd: int, config: Config, run_dir: Path
    ) -> None:
        self.channel = channel
        self.close_fd = close_fd
        self.page_fd = page_fd
        self.config = config
        self.run_dir = run_dir
        self.pid = os.getpid()
        self.assignment: Assign | None = None
        self.committed_step = -1
        self._naming: CaptureStep | None = None  # told, not yet reached
        self._boundary_step = 0  # newest boundary passed
        self._naming_lock = threading.Lock()
        self._inbox: queue.Queue[AgentToWorker] = queue.Queue()
        self._put_back: list[AgentToWorker] = []
        self._reader = ReaderThread(channel, self._deliver, self._agent_gone, "deadpool-messages")

    def start(self) -> None:
        self._reader.start()

    def send(self, message: WorkerToAgent) -> None:
        self.channel.send(message)

    def put_back(self, message: AgentToWorker) -> None:
        """Let the next `receive` return it. Only the training thread receives."""
        self._put_back.append(message)

    def receive(self) -> AgentToWorker:
        """The next message. A dead agent ends the process, so this cannot wait for ever on nobody."""
        if self._put_back:
            return self._put_back.pop()
        return self._inbox.get()

    # ---- named capture -------------------------------------------------------------------------------

    def pass_boundary(self, step: int) -> CaptureStep | None:
        """The boundary of `step` is passed; returns the naming to obey now, if there is one."""
        with self._naming_lock:
            self._boundary_step = step
            naming = self._naming
            if naming is not None and naming.step <= step:
                self._naming = None
                return naming if naming.step == step else None
        return None

    def restart_boundaries(self, step: int) -> None:
        """Training goes on after `step`, in a new generation: older namings are void."""
        with self._naming_lock:
            self._boundary_step = step
            self._naming = None

    def refuse(self, naming: CaptureStep, why: str, *, is_lasting: bool = False) -> None:
        """This rank will not capture the named step; final."""
        self.send(
            Refused(
                generation=naming.generation,
                step=naming.step,
                at_step=self._boundary_step,
                why=why,
                is_lasting=is_lasting,
            )
        )

    def _on_naming(self, naming: CaptureStep) -> None:
        with self._naming_lock:
            self.committed_step = naming.committed_step
            is_late = naming.step <= self._boundary_step
            if not is_late:
                self._naming = naming
        if is_late:
            self.refuse(naming, "its boundary had passed")

    # ---- the script ----------------------------------------------------------------------------------

    def run(self) -> int:
        """Park until assigned, run the script, and return the exit code."""
        while True:
            message = self.receive()
            if not isinstance(message, Assign):
                continue  # namings or aborts of a generation this worker never joined
            self.assignment = message
            if message.rehearse:
                self._rehearse(message)
            else:
                return self._run_script(message)

    def _rehearse(self, assignment: Assign) -> None:
        """Build once as some rank and throw everything away: the second build is ten times faster."""
        started = time.monotonic()
        problem = ""
        try:
            self._execute(assignment)
            problem = "the script ended without calling wrap"
        except BuildDiscarded:
            pass  # expected: wrap was reached
        except (Exception, SystemExit) as error:  # any error of the script only costs the warm-up
            problem = f"{type(error).__name__}: {error}"
        self._forget_build()
        self.assignment = None
        self.send(Rehearsed(seconds=time.monotonic() - started, problem=problem))

    def _forget_build(self) -> None:
        from deadpool.runtime.session import forget_session
        from deadpool.snapshot.adapter import forget_builds
        from deadpool.snapshot.frameworks.dtensor import forget_meshes

        forget_session()
        forget_builds()
        forget_meshes()
        gc.collect()

    def _run_script(self, assignment: Assign) -> int:
        try:
            self._execute(assignment)
        except SystemExit as error:
            code = error.code
            return code if isinstance(code, int) else 0 if code is None else 1
        except KeyboardInterrupt:
            return int(ExitCode.INTERRUPTED)
        except Exception as error:
            return self._report_failure(error)
        return 0

    def _report_failure(self, error: Exception) -> int:
        """An exception left the script outside `train`: the job cannot go on without this rank."""
        text = traceback.format_exc()
        assignment = self.assignment
        is_bad_input = _is_bad_input(error)
        self.send(
            Raised(
                generation=assignment.generation if assignment else 0,
                step=-1,
                collective=False,
                bad_input=is_bad_input,
                text=f"{type(error).__name__}: {error}",
                traceback=str(error) if is_bad_input else text,
            )
        )
        return int(ExitCode.BAD_INPUT if is_bad_input else ExitCode.USER_ERROR)

    def _execute(self, assignment: Assign) -> None:
        script = self.config.run.script
        if self.config.run.record_dir:
            _seed(assignment.rank)
        os.environ["RANK"] = str(assignment.rank)
        os.environ["WORLD_SIZE"] = str(assignment.world_size)
        os.environ["LOCAL_RANK"] = str(assignment.local_rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(assignment.local_world_size)
        sys.argv = [script, *self.config.run.script_args]
        folder = str(Path(script).resolve().parent)
        if sys.path[0] != folder:
            sys.path.insert(0, folder)
        runpy.run_path(script, run_name="__main__")

    def give_up(self, reason: str) -> NoReturn:
        """End as a lost worker: its agent sees the process die, and its copies stay."""
        self._exit_now(int(ExitCode.USER_ERROR), reason)

    def _deliver(self, message: AgentToWorker) -> None:
        match message:
            case Exit(code=code, reason=reason):
                self._exit_now(code, reason)
            case CaptureStep():
                self._on_naming(message)
            case WithdrawStep(step=step):
                with self._naming_lock:
                    if self._naming is not None and self._naming.step == step:
                        self._naming = None
            case _:
                self._inbox.put(message)

    def _agent_gone(self, why: str) -> None:
        """Agent death is host loss: nothing may be written after it."""
        self._exit_now(int(ExitCode.REPLACED), f"the agent is gone: {why}")

    @staticmethod
    def _exit_now(code: int, reason: str) -> NoReturn:
        if reason:
            print(f"deadpool: worker ends with code {code}: {reason}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)


def _is_bad_input(error: Exception) -> bool:
    from deadpool.errors import ConfigError, IntegrationError, LayoutMismatch

    return isinstance(error, ConfigError | IntegrationError | LayoutMismatch)


def _seed(rank: int) -> None:
    """Recorded runs start from known generators, also those that the script leaves to chance.

    Otherwise two runs could not be compared, disturbed or not.
    """
    import numpy
    import torch

    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its agent dies; covers an agent that is already gone."""
    if _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(int(ExitCode.REPLACED))


def bind_forked_children() -> None:
    """Let the processes that this one forks, data workers for instance, die with it, whatever kills it.

    Only those that the calling thread forks: the kernel watches the parent's thread, which must last.
    """
    thread = threading.get_ident()  # the same in a forked child
    parent = 0

    def before() -> None:
        nonlocal parent
        parent = os.getpid()

    def in_child() -> None:
        if threading.get_ident() == thread:
            die_with_parent(parent)

    os.register_at_fork(before=before, after_in_child=in_child)


def self_test() -> None:
    """A small computation whose result is known; a device is exercised too when there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    product = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    if product.sum().item() != 512.0:
        raise DeadPoolError(f"self-test: {device} computed a wrong sum; this host is not fit to train")


def main() -> int:
    """Entry point of the process."""
    global _current
    started = time.monotonic()
    handover = json.loads(os.environ.pop(ENVIRONMENT))
    die_with_parent(handover["parent"])
    bind_forked_children()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    # So is SIGTERM, which schedulers send to every process of a job. Not SIG_IGN: programs that the script
    # starts would inherit that.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    sock = socket.socket(fileno=handover["message_fd"])
    channel: Channel[AgentToWorker] = Channel(sock, AgentToWorker)
    config = Config.from_bytes(bytes.fromhex(handover["config"]))
    worker = WorkerProcess(
        channel, handover["close_fd"], handover["page_fd"], config, Path(handover["run_dir"])
    )
    _current = worker
    import torch

    import deadpool.runtime.session  # noqa: F401 imported while parked, so that a promotion does not wait

    self_test()
    worker.start()
    versions = {"torch": str(torch.__version__), "deadpool": __version__}
    worker.send(Ready(pid=os.getpid(), versions=versions, seconds=time.monotonic() - started))
    return worker.run()
