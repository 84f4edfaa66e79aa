"""A worker process, driven by its agent's messages over a real socket pair."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from deadpool.config import Config, RunConfig
from deadpool.errors import ExitCode
from deadpool.runtime.ipc import Channel
from deadpool.runtime.messages import (
    AgentToWorker,
    Assign,
    CaptureStep,
    Exit,
    Raised,
    Refused,
    Run,
    WithdrawStep,
    WorkerToAgent,
)
from tests.unit.runtime.support import TOKEN, WAIT_S

DRIVER = """
import json, socket, sys
from pathlib import Path

from deadpool.config import Config
from deadpool.runtime.ipc import Channel
from deadpool.runtime.messages import AgentToWorker
from deadpool.runtime.worker import WorkerProcess

messages, commands, config = int(sys.argv[1]), int(sys.argv[2]), Config.from_bytes(bytes.fromhex(sys.argv[3]))
channel = Channel(socket.socket(fileno=messages), AgentToWorker)
worker = WorkerProcess(channel, -1, -1, config, Path("."))
worker.start()
file = socket.socket(fileno=commands).makefile("rw")
for line in file:
    command, *arguments = json.loads(line)
    if command == "sync":
        answer = type(worker.receive()).__name__
    elif command == "committed":
        answer = worker.committed_step
    elif command == "aborting":
        answer = worker.aborting and worker.aborting.generation
    elif command == "run":
        sys.exit(worker.run())
    else:
        naming = getattr(worker, command)(*arguments)
        answer = naming and [naming.step, naming.bank]
    print(json.dumps(answer), file=file, flush=True)
"""


class Worker:
    """One worker process: the agent's end of its channel, and commands to its training thread."""

    def __init__(self, config: Config) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._commands, commands_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                DRIVER,
                str(theirs.fileno()),
                str(commands_theirs.fileno()),
                config.to_bytes().hex(),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(theirs.fileno(), commands_theirs.fileno()),
        )
        theirs.close()
        commands_theirs.close()
        mine.settimeout(WAIT_S)
        self._commands.settimeout(WAIT_S)
        self._file: IO[str] = self._commands.makefile("rw")
        self.channel: Channel[WorkerToAgent] = Channel(mine, WorkerToAgent)

    def do(self, command: str, *arguments: int) -> Any:
        """Let the training thread do something; returns what came of it."""
        self.begin(command, *arguments)
        return json.loads(self._file.readline())

    def begin(self, command: str, *arguments: int) -> None:
        print(json.dumps([command, *arguments]), file=self._file, flush=True)

    def hear(self, *messages: AgentToWorker) -> None:
        """Send messages; returns once the worker has taken them all."""
        for message in (*messages, Run(generation=0)):
            self.channel.send(message)
        assert self.do("sync") == "Run"

    def close(self) -> None:
        self._file.close()
        self._commands.close()
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(Config())
    yield made
    made.close()


def _naming(step: int, bank: int = 0, *, generation: int = 1, committed_step: int = -1) -> CaptureStep:
    return CaptureStep(generation=generation, step=step, bank=bank, committed_step=committed_step)


def test_a_naming_is_obeyed_at_its_boundary_and_only_there(worker: Worker) -> None:
    worker.hear(_naming(3, bank=1))
    assert worker.do("pass_boundary", 1) is None
    assert worker.do("pass_boundary", 2) is None
    assert worker.do("pass_boundary", 3) == [3, 1]
    assert worker.do("pass_boundary", 4) is None


def test_a_naming_of_a_step_that_is_over_is_refused_with_the_step_that_the_worker_is_at(
    worker: Worker,
) -> None:
    worker.do("pass_boundary", 5)
    worker.hear(_naming(5, generation=4))
    refused = worker.channel.receive()
    assert isinstance(refused, Refused)
    assert (refused.generation, refused.step, refused.at_step) == (4, 5, 5)
    assert not refused.is_lasting  # a later step may be heard of in time
    assert worker.do("pass_boundary", 6) is None


def test_a_newer_naming_replaces_the_one_before(worker: Worker) -> None:
    worker.hear(_naming(2, bank=1), _naming(4, bank=0))
    assert worker.do("pass_boundary", 1) is None
    assert worker.do("pass_boundary", 2) is None
    assert worker.do("pass_boundary", 3) is None
    assert worker.do("pass_boundary", 4) == [4, 0]


def test_a_late_naming_leaves_the_one_that_can_still_be_obeyed(worker: Worker) -> None:
    worker.do("pass_boundary", 3)
    worker.hear(_naming(5, bank=1), _naming(2, bank=0))
    assert isinstance(worker.channel.receive(), Refused)
    worker.do("pass_boundary", 4)
    assert worker.do("pass_boundary", 5) == [5, 1]


def test_a_naming_that_is_withdrawn_is_not_obeyed(worker: Worker) -> None:
    worker.hear(_naming(2), WithdrawStep(generation=1, step=2))
    assert worker.do("pass_boundary", 1) is None
    assert worker.do("pass_boundary", 2) is None


def test_withdrawing_another_step_changes_nothing(worker: Worker) -> None:
    worker.hear(_naming(2, bank=1), WithdrawStep(generation=1, step=1))
    worker.do("pass_boundary", 1)
    assert worker.do("pass_boundary", 2) == [2, 1]


def test_after_a_recovery_older_namings_are_void_and_steps_are_counted_from_the_rollback(
    worker: Worker,
) -> None:
    worker.do("pass_boundary", 8)
    worker.hear(_naming(10, bank=1))
    worker.do("restart_boundaries", 5)
    assert [worker.do("pass_boundary", step) for step in (6, 7)] == [None, None]
    worker.hear(_naming(9, bank=0, generation=2))
    assert [worker.do("pass_boundary", step) for step in (8, 9, 10)] == [None, [9, 0], None]


def test_every_naming_tells_up_to_which_step_all_ranks_are_protected(worker: Worker) -> None:
    assert worker.do("committed") == -1
    worker.do("pass_boundary", 3)
    worker.hear(_naming(4, committed_step=2))
    assert worker.do("committed") == 2
    worker.hear(_naming(1, committed_step=3))  # too late to capture, but it says so all the same
    assert worker.do("committed") == 3


# ---- the end of a worker ---------------------------------------------------------------------------------


def _end_of(worker: Worker) -> tuple[int, str]:
    assert worker.process.stderr is not None
    output = worker.process.stderr.read()
    return worker.process.wait(WAIT_S), output


def test_a_worker_ends_at_once_when_its_agent_is_gone(worker: Worker) -> None:
    worker.hear(_naming(2))
    worker.channel.close()
    code, output = _end_of(worker)
    assert code == ExitCode.REPLACED
    assert "agent is gone" in output


def test_a_worker_that_is_told_to_exit_ends_with_that_code_and_says_why(worker: Worker) -> None:
    worker.channel.send(Exit(code=3, reason="no spare came"))
    code, output = _end_of(worker)
    assert code == 3
    assert "no spare came" in output


# ---- the script ------------------------------------------------------------------------------------------


def _assign() -> Assign:
    return Assign(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        generation=6,
        rendezvous=("127.0.0.1", 1),
        token=TOKEN,
        member="a",
    )


@pytest.fixture
def scripted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    """A worker whose script is the parameter; it is told to run."""
    script = tmp_path / "train.py"
    script.write_text(request.param)
    made = Worker(Config(run=RunConfig(script=str(script), script_args=("--lr", "0.1"))))
    made.begin("run")
    yield made
    made.close()


def _scripted(*lines: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scripted", ["\n".join(lines)], indirect=True, ids=["script"])


@_scripted(
    "import os, sys",
    "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')",
    "seen = [os.environ[name] for name in names] + sys.argv[1:] + [__name__]",
    "sys.exit(5 if seen == ['3', '4', '1', '2', '--lr', '0.1', '__main__'] else 1)",
)
def test_the_script_runs_as_its_rank_with_its_arguments_and_its_exit_code_counts(scripted: Worker) -> None:
    scripted.channel.send(_naming(1))  # of a generation that it never joined
    scripted.channel.send(_assign())
    assert _end_of(scripted) == (5, "")


@_scripted("raise ValueError('of the script')")
def test_an_exception_outside_the_steps_is_reported_and_ends_the_worker(scripted: Worker) -> None:
    scripted.channel.send(_assign())
    raised = scripted.channel.receive()
    assert isinstance(raised, Raised)
    assert (raised.generation, raised.step, raised.bad_input) == (6, -1, False)
    assert raised.text == "ValueError: of the script"
    assert "train.py" in raised.traceback
    assert _end_of(scripted)[0] == ExitCode.USER_ERROR


@_scripted("from deadpool.errors import ConfigError", "raise ConfigError(['data: no state', 'model: none'])")
def test_bad_input_is_reported_as_such_and_without_a_traceback(scripted: Worker) -> None:
    scripted.channel.send(_assign())
    raised = scripted.channel.receive()
    assert isinstance(raised, Raised)
    assert raised.bad_input
    assert raised.traceback == "data: no state\nmodel: none"
    assert _end_of(scripted)[0] == ExitCode.BAD_INPUT
