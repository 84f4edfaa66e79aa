"""`deadpool status`: asks the control plane and all agents at the same time, and shows what they say.

Nothing here waits longer than `DEADLINE_S`, whoever does not answer. With etcd away the agents that the run
folder names are still asked, what they know is shown, and the exit code is 5.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from deadpool.cli.agents import Inquiry
from deadpool.cli.job_status import StoreAnswer, assemble_status, ended_status
from deadpool.cli.jobs import JobFile, find_job_at, is_running
from deadpool.cli.rundir import read_agents
from deadpool.cli.status_text import describe_status
from deadpool.errors import ConfigError, ExitCode, MembershipError
from deadpool.report import JobStatus
from deadpool.runtime.result import RunResult, read_result

DEADLINE_S = 2.4  # the command itself answers within 3 s, start included
_STORE_TIMEOUT_S = 1.4  # etcd's share of the deadline: agents that only it knows are asked after it
_LAST_ANSWERS_S = 0.7  # left for agents that only etcd knew: measured for 1,250 that answer in 5 ms
_FEW_ANSWERS_S = 0.3  # the same where the run folder has named most of them
_FOLDER_S = 0.3  # for a run folder, which may hang, to say where agents are
_REASON_MARGIN_S = 0.4  # so that the store's own reason arrives before we give up on it

T = TypeVar("T")


def status_command(
    job_id: str | None,
    *,
    as_json: bool = False,
    show_all: bool = False,
    etcd: str | None = None,
    jobs_folder: Path | None = None,
) -> int:
    """Print the status of a job; returns the exit code.

    Args:
        job_id: of a job of this machine, or the run folder of a job under Slurm; None: the only one here.
        as_json: all of it, as JSON.
        show_all: every host and rank, of a large job, too.
        etcd: endpoints, for a job that is elsewhere.
        jobs_folder: of the job files.

    Raises:
        ConfigError: no such job.
    """
    job = find_job_at(job_id, etcd, jobs_folder)
    status, problem = gather_status(job)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=1).decode())
    elif status.hosts or not problem:
        print("\n".join(describe_status(status, show_all=show_all)))
    if problem:
        print(f"control plane unreachable: {problem}", file=sys.stderr)
        return ExitCode.CONTROL_PLANE_UNREACHABLE
    return ExitCode.FINISHED


def gather_status(job: JobFile) -> tuple[JobStatus, str]:
    """Ask everybody within the deadline.

    Returns:
        The status, and why the control plane does not answer ("" if it does, or the job has ended).

    Raises:
        ConfigError: the control plane knows no such job.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    inquiry = Inquiry(deadline_s)
    folder = _Question(partial(read_agents, Path(job.run_dir)))
    ended = _Question(partial(_result, job))
    members = {agent.address: agent.member for agent in folder.wait(time.monotonic() + _FOLDER_S) or ()}
    if job.token:  # agents do not answer without it
        inquiry.ask(members, job.token)
    # gRPC takes a third of a second to import, more on a busy machine: that is not etcd's silence.
    import_module("deadpool.membership.etcd")
    store = _Question(partial(_ask_store, job))
    asked_s = time.monotonic()
    left_s = _FEW_ANSWERS_S if job.token else _LAST_ANSWERS_S
    found = store.wait(min(asked_s + _STORE_TIMEOUT_S, deadline_s - left_s))
    waited_s = time.monotonic() - asked_s
    answer = found or StoreAnswer()
    registered = {f"{each.address}:{each.control_port}": each.id for each in answer.members}
    inquiry.ask(registered if not job.token else registered.keys() - members, job.token or answer.token)
    members.update(registered)
    agents = {reply.member: reply for reply in inquiry.answers()}
    asked = {members[address] for address in list(inquiry.asked)} | agents.keys()
    result = ended.wait(deadline_s)
    if result is not None and not agents and not answer.members:
        return ended_status(job.job_id, result), ""
    problem = ""
    if found is None:
        problem = store.problem or f"no answer from {', '.join(job.etcd)} within {waited_s:.1f} s"
        if job.pid and not is_running(job.pid):
            problem += f"; the launcher of the job (pid {job.pid}) has ended"
    elif not answer.members and answer.view is None and not agents:
        raise ConfigError([f"no job {job.job_id!r} at {', '.join(job.etcd)}"])
    return assemble_status(job.job_id, answer, agents, is_reachable=not problem, asked=asked), problem


def _result(job: JobFile) -> RunResult | None:
    """How the job ended, if its folder says so; while its launcher runs, that is how one before it ended."""
    folder = Path(job.run_dir)
    has_result = bool(job.run_dir) and (folder / "result.json").exists()
    return read_result(folder) if has_result and not is_running(job.pid) else None


class _Question(Generic[T]):
    """Asks somebody on a thread of its own, so that one who does not answer delays nobody."""

    def __init__(self, ask: Callable[[], T | None]) -> None:
        self._ask = ask
        self._answer: T | None = None
        self.problem = ""
        # A daemon: it is not waited for past the deadline, and the command ends then.
        self._thread = threading.Thread(target=self._run, name="status-question", daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float) -> T | None:
        """The answer, or None if there is none by then (time.monotonic)."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return None if self._thread.is_alive() else self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except (OSError, MembershipError, ConfigError) as error:
            self.problem = str(error)


def _ask_store(job: JobFile) -> StoreAnswer:
    from deadpool.cli.store import open_store
    from deadpool.membership.registry import Registry

    with contextlib.closing(open_store(job, _STORE_TIMEOUT_S - _REASON_MARGIN_S)) as store:
        registry = Registry(store, job.job_id)
        claim, _ = registry.claim()
        return StoreAnswer(
            members=registry.members(),
            view=registry.view()[0],
            quarantined={each.host: each.reason for each in registry.quarantined()},
            recoveries=registry.recoveries(),
            token="" if claim is None else claim.token,
        )
