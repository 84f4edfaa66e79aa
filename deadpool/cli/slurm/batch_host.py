"""The work of the batch script when its host is dead.

[Note: the batch host may die]
    Slurm ends a job when its batch script ends. If the batch host dies, nobody runs the script any more and
    the job stays RUNNING, empty, until its time is up. So other hosts look at their end whether the batch
    host is dead, and the first of them cancels the job once all have ended. Slurm then shows CANCELLED,
    whatever became of the training: `result.json` tells that.

    To cancel a job that lives would be worse than to leave an empty one. A host that reaches no other may be
    the one that is cut off, so it takes Slurm's word for who is dead, and the run folder's for the end.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from deadpool.cli.slurm import tools
from deadpool.cli.slurm.ending import POLL_S, conclude, settle, wait_for_members
from deadpool.cli.slurm.job import SlurmJob, read_ends, read_grown
from deadpool.errors import ExitCode
from deadpool.runtime.result import read_result

DIAL_S = 2.5
DIAL_TIMEOUT_S = 2.0
TURN_S = 0.2  # between the looks of neighbours in the list of nodes, so that a thousand do not ask at once
HANDOVER_S = 30.0  # a batch script that lives has ended the job by then
LOOK_AGAIN_S = 10.0
GIVE_UP_S = 900.0  # Slurm gives a silent node up after SlurmdTimeout, 300 s by default


def end_without_batch_host(
    run_dir: Path, job: SlurmJob, node: str, code: int, job_ends: threading.Event
) -> None:
    """After the end of a node's host: cancel the job if it is over and the batch host is dead (see [Note]).

    Hosts that cannot connect to the batch host have this duty, and those with a member of etcd, too: a batch
    host that hangs accepts connections, or it dies later.

    Args:
        run_dir: folder of this submission.
        job: what `prepare` wrote.
        node: this one.
        code: of its host. After TERMINATED, Slurm may be ending the job, and waits for every process of it.
        job_ends: set when Slurm says that it ends the job.
    """
    seems_dead = not is_alive(job.batch_address)
    is_keeper = code != ExitCode.TERMINATED and any(member.node == node for member in job.etcd)
    if node == job.batch_host or not (seems_dead or is_keeper):
        return
    place = job.nodes.index(node) if node in job.nodes else len(job.nodes)
    pause_s = place * TURN_S + (POLL_S if seems_dead else HANDOVER_S)
    if not wait_for_members(run_dir, job, job_ends, POLL_S + place * TURN_S):
        return
    deadline_s = time.monotonic() + GIVE_UP_S
    while not job_ends.wait(pause_s):
        pause_s = LOOK_AGAIN_S
        try:
            if is_abandoned(run_dir, job):
                _cancel(run_dir, job, job_ends)
                return
        except (tools.SlurmFailed, OSError) as error:
            tools.say(f"whether job {job.command_id} has to be cancelled cannot be seen now: {error}")
        if time.monotonic() > deadline_s:
            tools.say(
                f"Slurm does not say that batch host {job.batch_host} is dead, so job {job.command_id} is "
                "not cancelled here"
            )
            return


def is_abandoned(run_dir: Path, job: SlurmJob) -> bool:
    """Whether the job is over and its batch script dead, as Slurm and the run folder tell.

    Raises:
        SlurmFailed: slurmctld does not answer.
        OSError: the run folder cannot be read.
    """
    if not is_down(tools.show_nodes([job.batch_host]).get(job.batch_host, {})):
        # Slurm takes a dead node out of the job, and it may have come back since, without the batch script.
        left = tools.expand(tools.show_job(job.command_id).get("NodeList", job.batch_host))
        if job.batch_host in left:
            return False
    if read_result(run_dir).phase:
        return True
    nodes, ends = (*job.nodes, *read_grown(run_dir)), read_ends(run_dir)
    shown = tools.show_nodes(nodes)
    return all(node in ends or is_down(shown.get(node, {})) for node in nodes)


def is_down(node: Mapping[str, str]) -> bool:
    """Whether slurmctld counts a node as dead, or hears nothing of it; `node`: what scontrol shows of it."""
    return any(mark in node.get("State", "") for mark in ("DOWN", "NOT_RESPONDING", "*"))


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


def _cancel(run_dir: Path, job: SlurmJob, job_ends: threading.Event) -> None:
    code, reason = conclude(run_dir)
    tools.say(
        f"{reason} (code {code}); batch host {job.batch_host} is dead, so job {job.command_id} is cancelled "
        "here"
    )
    settle(run_dir, job, code, reason)
    try:
        tools.call("scancel", job.command_id)
    except tools.SlurmFailed as error:
        if not job_ends.is_set():  # else the job's end has ended this command, too
            tools.say(f"end job {job.command_id} by hand: {error}")
