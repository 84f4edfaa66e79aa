"""How a job comes to its end under Slurm: who waits for whom, the exit code, and submitting it again.

[Note: the batch host may die]
    Slurm ends a job when its batch script ends. If the batch host dies, nobody runs the script any more and
    the job stays RUNNING, empty, until its time is up. So the hosts of the other nodes look at their end
    whether the batch host still answers; if it does not, the first of them cancels the job once all have
    ended. Slurm then shows CANCELLED, whatever became of the training: `result.json` tells that.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from deadpool.cli.rundir import read_agents
from deadpool.cli.slurm import tools
from deadpool.cli.slurm.grow import cancel_requests
from deadpool.cli.slurm.job import SlurmJob, read_ends, read_grown
from deadpool.cli.slurm.members import Members
from deadpool.errors import ExitCode
from deadpool.liveness.stat import is_running
from deadpool.runtime.result import read_result

POLL_S = 0.5
LOOK_S = 10.0  # between two questions to etcd while nothing says that the job is ending
DESERTED_S = 300.0  # as long as Slurm itself, by default, waits for a silent node
DIAL_S = 2.5
DIAL_TIMEOUT_S = 2.0
TURN_S = 0.2  # added to the pause between two looks, for every place in the list of nodes
RESUBMITTED = "resubmitted"

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
    config = job.decode_config()
    members = Members(run_dir, config)
    limit_s = DESERTED_S + config.membership.start_timeout_s
    next_look_s = 0.0
    while True:
        ends = read_ends(run_dir)
        has_steps = any(is_running(pid) for pid in pids)
        if not has_steps and all(node in ends for node in read_grown(run_dir)):
            return
        is_ending = (
            not has_steps
            or bool(read_result(run_dir).phase)
            or any(code in _STOPPED for code in ends.values())
        )
        if is_ending or time.monotonic() >= next_look_s:
            next_look_s = time.monotonic() + LOOK_S
            members.ask()
            if is_ending and members.have_ended():
                return
            if members.missing_s >= limit_s:
                print(
                    f"deadpool: for {members.missing_s:.0f} s no host of job {config.job.job_id} has been "
                    "registered in etcd, and steps run on: the job is given up; see the logs of the nodes",
                    file=sys.stderr,
                    flush=True,
                )
                return
        time.sleep(POLL_S)


def wait_for_members(
    run_dir: Path, job: SlurmJob, job_ends: threading.Event, pause_s: float = POLL_S
) -> bool:
    """On any node, after the end of its own host: return True when no member of the job is left.

    Returns False if `job_ends` is set: Slurm is ending the job. Bounded by the life of the other hosts, as
    each member's key lives with its lease.
    """
    members = Members(run_dir, job.decode_config())
    members.ask()
    while not members.have_ended():
        if job_ends.wait(pause_s):
            return False
        members.ask()
    return True


def end_without_batch_host(run_dir: Path, job: SlurmJob, node: str, job_ends: threading.Event) -> bool:
    """After the end of a node's host: do the work of the batch script if its host is dead (see [Note]).

    Returns whether the job is over.
    """
    if node == job.batch_host or is_alive(job.batch_address):
        return False
    # Each node looks more seldom than those before it, so that a thousand do not ask etcd at once.
    place = job.nodes.index(node) if node in job.nodes else len(job.nodes)
    if not wait_for_members(run_dir, job, job_ends, POLL_S + place * TURN_S):
        return True  # another node was faster
    code, reason = conclude(run_dir)
    print(
        f"deadpool: {reason} (code {code}); batch host {job.batch_host} does not answer, so job "
        f"{job.command_id} is cancelled here",
        file=sys.stderr,
        flush=True,
    )
    settle(run_dir, job, code)
    try:
        tools.call("scancel", job.command_id)
    except tools.SlurmFailed as error:
        if not job_ends.is_set():  # else the job's end has ended this command, too
            print(f"deadpool: end job {job.command_id} by hand: {error}", file=sys.stderr, flush=True)
    return True


def is_alive(address: tuple[str, int] | None) -> bool:
    """Whether slurmd of a node accepts connections; a refusal is repeated, as slurmd may be restarting."""
    deadline_s = time.monotonic() + DIAL_S
    while address is not None:
        try:
            with socket.create_connection(address, timeout=DIAL_TIMEOUT_S):
                return True
        except OSError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
    return True


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
        (ExitCode.CONTROL_PLANE_UNREACHABLE, "No host reached the control plane."),
    ):
        if code in codes:
            return int(code), reason
    failed_codes = sorted(codes - {0})
    if failed_codes:
        return failed_codes[0], "The hosts ended without a result; see their logs."
    if not read_agents(run_dir):
        return int(
            ExitCode.BAD_INPUT
        ), "No host started: is `deadpool` on PATH there? See the logs of the nodes."
    return int(ExitCode.STATE_LOST), "Every host of the job was killed; no copy is left."


def settle(run_dir: Path, job: SlurmJob, code: int) -> None:
    """What is left to do in Slurm when all hosts have ended."""
    if job.decode_config().membership.grow_command:
        try:
            cancel_requests(job)
        except tools.SlurmFailed as error:
            print(f"deadpool: a request for a node may be left in the queue: {error}", file=sys.stderr)
    if code == ExitCode.TERMINATED:
        submit_again(run_dir, job)


def submit_again(run_dir: Path, job: SlurmJob) -> None:
    """Submit the job again, once, however many nodes try; not if a person has cancelled it."""
    if job.requeue in ("", "none"):
        return
    mark = run_dir / RESUBMITTED
    try:
        if _was_cancelled(job.command_id):
            print(
                "deadpool: the job was cancelled, so it is not submitted again", file=sys.stderr, flush=True
            )
            return
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    except tools.SlurmFailed as error:
        print(f"deadpool: submit the job again by hand: {error}", file=sys.stderr, flush=True)
        return
    try:
        said = _run_requeue(run_dir, job)
    except tools.SlurmFailed as error:
        mark.unlink()
        print(f"deadpool: submit the job again by hand: {error}", file=sys.stderr, flush=True)
        return
    mark.write_text(said)
    print(f"deadpool: submitted again: {said.strip()}", file=sys.stderr, flush=True)


def _run_requeue(run_dir: Path, job: SlurmJob) -> str:
    # Under the same job id, the checkpoint folder is the same one.
    environment = {**tools.clean_environment(), "DEADPOOL_JOB_JOB_ID": job.decode_config().job.job_id}
    if job.requeue == "sbatch":
        nodes = f"--nodes={len(job.nodes)}"
        script = str(run_dir / "job.sbatch")
        options = [nodes, *job.submit_options]
        if job.array is not None:  # this task alone, whatever the script says
            options.append(f"--array={job.array[1]}")
        if os.environ.get("SLURM_EXPORT_ENV") == "NONE":  # as the script asks; but the job id has to arrive
            options.append("--export=DEADPOOL_JOB_JOB_ID")
        return tools.call("sbatch", "--parsable", *options, script, environment=environment)
    if job.requeue == "scontrol":
        tools.call("scontrol", "update", f"JobId={job.command_id}", "Requeue=1")
        tools.call("scontrol", "requeue", job.command_id)
        return job.command_id
    return tools.call(*shlex.split(job.requeue), environment=environment)


def _was_cancelled(slurm_id: str) -> bool:
    """A warned job still runs; one that is being ended was pre-empted, or cancelled."""
    shown = tools.show_job(slurm_id)
    return shown.get("JobState") != "RUNNING" and shown.get("PreemptTime", "None") == "None"


def ignore_stop_signals() -> None:
    """Slurm tells all processes of a job to end; hosts do, and what waits for them must see it happen."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
