"""How a job comes to its end under Slurm: who waits for whom, the exit code, what is left to do then."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deadpool.cli.rundir import read_agents
from deadpool.cli.slurm import tools
from deadpool.cli.slurm.grow import cancel_requests
from deadpool.cli.slurm.job import SlurmJob, read_ends, read_grown
from deadpool.cli.slurm.members import Members
from deadpool.cli.slurm.requeue import submit_again
from deadpool.errors import DeadPoolError, ExitCode
from deadpool.liveness.stat import is_running
from deadpool.runtime.result import note_result, read_result

POLL_S = 0.5
LOOK_S = 10.0  # between two questions to etcd while nothing says that the job is ending
DESERTED_S = 300.0  # as long as Slurm itself, by default, waits for a silent node

_STOPPED = (int(ExitCode.TERMINATED), int(ExitCode.INTERRUPTED))


def wait_for_hosts(run_dir: Path, job: SlurmJob, pids: Sequence[int]) -> None:
    """On the batch host: return when all hosts have ended, without waiting for nodes that are dead.

    Slurm ends the step of a dead node only when it has given the node up (SlurmdTimeout, 5 min by default).
    The hosts of nodes that joined later are no children of the batch script; they count all the same. Hosts
    that neither end nor register are given up after DESERTED_S and the time that workers may take to start.

    Args:
        run_dir: folder of this submission.
        job: what `prepare` wrote.
        pids: of the `srun` processes; that of a dead node may stay.
    """
    members = Members(run_dir, job)
    limit_s = DESERTED_S + job.decode_config().membership.start_timeout_s
    next_look_s = 0.0

    def look() -> bool:
        nonlocal next_look_s
        ends, grown = read_ends(run_dir), read_grown(run_dir)
        left = {*job.nodes, *grown} - ends.keys()
        has_steps = any(is_running(pid) for pid in pids)
        if not left or not (has_steps or left.intersection(grown)):
            return True
        was_stopped = any(code in _STOPPED for code in ends.values())
        is_ending = not has_steps or was_stopped or bool(read_result(run_dir).phase)
        if not is_ending and time.monotonic() < next_look_s:
            return False
        next_look_s = time.monotonic() + LOOK_S
        members.ask()
        if is_ending:
            return members.have_ended()
        # Silence is no end here: it may be this host that reaches nobody.
        had_time = left <= {agent.host for agent in read_agents(run_dir)} or members.missing_s >= limit_s
        return had_time and members.are_missing and members.have_ended()

    _until(look, POLL_S)


def wait_for_members(
    run_dir: Path, job: SlurmJob, job_ends: threading.Event, pause_s: float = POLL_S
) -> bool:
    """On any node, after the end of its own host: return True when no member of the job is left.

    Returns False if `job_ends` is set: Slurm is ending the job. Bounded by the life of the other hosts, as
    each member's key lives with its lease, and by the job's time limit.
    """
    members = Members(run_dir, job)

    def look() -> bool:
        members.ask()
        return members.have_ended()

    return _until(look, pause_s, job_ends)


def _until(look: Callable[[], bool], pause_s: float, stop: threading.Event | None = None) -> bool:
    """Call `look` until it is true; False if `stop` is set before.

    A shared file system may be away for minutes. To fail then would end a job that trains on.
    """
    stop, said = stop or threading.Event(), ""
    while True:
        try:
            if look():
                return True
        except (OSError, ValueError, DeadPoolError) as error:
            if said != str(error):
                said = str(error)
                tools.say(f"cannot see how the job is, looking again: {said}")
        if stop.wait(pause_s):
            return False


def conclude(run_dir: Path) -> tuple[int, str]:
    """Exit code of the job and a sentence. Codes of `srun` do not count: a dead node's is 0."""
    result = read_result(run_dir)
    ends = read_ends(run_dir)
    if result.phase:
        final = {member.rpartition("-")[0] for member in result.members}  # their hosts, which are the nodes
        failed = sorted(node for node, code in ends.items() if code and node in final)
        if result.exit_code or not failed:
            return result.exit_code, result.reason
        return ends[failed[0]], f"{result.reason} The script then failed on {', '.join(failed)}."
    codes = set(ends.values())
    for code, reason in (
        (ExitCode.TERMINATED, "The warning signal came."),
        (ExitCode.INTERRUPTED, "The job was interrupted."),
        (ExitCode.BAD_INPUT, "A host refused its input; see its log."),
        (ExitCode.CONTROL_PLANE_UNREACHABLE, "The hosts did not reach the control plane; see their logs."),
    ):
        if code in codes:
            return int(code), reason
    failed_codes = sorted(codes - {0})
    if failed_codes:
        return failed_codes[0], "The hosts ended without a result; see their logs."
    if codes:  # a host ends with 0 only if all ranks have finished; the run folder took no result.json
        return 0, "The hosts ended in order."
    if not read_agents(run_dir):
        reason = "No host came to register: see above what srun says, and the nodes' logs."
        return int(ExitCode.BAD_INPUT), reason
    return int(ExitCode.STATE_LOST), "Every host of the job was killed, or does not answer; no copy is left."


def settle(run_dir: Path, job: SlurmJob, code: int, reason: str) -> None:
    """What is left to do when all hosts have ended: the result, requests for nodes, another submission."""
    try:
        note_result(run_dir, code, reason)
    except OSError as error:
        tools.say(f"{run_dir}: how the job ended could not be written: {error}")
    if job.decode_config().membership.grow_command:
        try:
            cancel_requests(job)
        except tools.SlurmFailed as error:
            tools.say(f"a request for a node may be left in the queue: {error}")
    if code == ExitCode.TERMINATED:
        try:
            submit_again(run_dir, job)
        except OSError as error:  # the code and the report of this job are worth more than this mark
            tools.say(f"look with `squeue --me` whether the job was submitted again: {error}")


def ignore_stop_signals() -> None:
    """Slurm tells all processes of a job to end; hosts do, and what waits for them must see it happen."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
