"""`deadpool slurm grow`: one more node for a running job, as a spare.

The new node is allocated as a job of its own that may only expand ours, given over to ours, and started on
with a step. Slurm must allow it: SchedulerParameters=permit_job_expansion.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from deadpool.cli.slurm import tools
from deadpool.cli.slurm.job import SlurmJob, note_grown, read_grown, read_job
from deadpool.cli.slurm.tools import SlurmFailed

STEP_START_S = 3.0  # a step that lives so long has started
TAKE_BACK_S = 10.0  # `salloc` asks slurmctld to take a request back
_GRANTED = re.compile(r"Granted job allocation (\d+)")

HOST_STEP = (
    *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap"),
    *("--nodes=1", "--ntasks=1", "--export=ALL"),
)
"""Options of the step of one node: the end of another node must not touch it."""


def host_step(run_dir: Path, job: SlurmJob, node: str) -> list[str]:
    """The command that runs the host of a node, as the batch script does for the first nodes."""
    return [
        *("srun", f"--jobid={job.slurm_id}", *HOST_STEP, f"--nodelist={node}"),
        *(f"--output={run_dir / f'{node}-%t.log'}", "--open-mode=append"),  # of a host that comes back, too
        *(sys.executable, "-m", "deadpool", "slurm", "host", str(run_dir)),
    ]


def grow(run_dir: Path, wait_s: float) -> str:
    """Bring one more node into the job; returns its name.

    Args:
        run_dir: folder of the submission.
        wait_s: how long the node may stay in the queue.

    Raises:
        SlurmFailed: no node came, or Slurm refused; the message says what to do.
    """
    job = read_job(run_dir)
    state = tools.show_job(job.command_id).get("JobState", "")
    if state != "RUNNING":
        raise SlurmFailed(f"job {job.command_id} is {state}: only a running job can take a node")
    environment = tools.clean_environment()
    cancel_requests(job)  # of a leader that died while it waited
    # Every node that the job ever had: those that live cannot be allocated again, those that failed must not.
    extra = _allocate(job, (*job.nodes, *read_grown(run_dir)), wait_s, environment)
    try:
        node = tools.call("squeue", "--noheader", "--jobs", extra, "--format=%N").strip()
        note_grown(run_dir, node)
        tools.call("scontrol", "update", f"JobId={extra}", "NumNodes=0", environment=environment)
    except SlurmFailed:
        tools.call("scancel", extra)
        raise
    _start_host(run_dir, job, node, environment)
    return node


def cancel_requests(job: SlurmJob) -> None:
    """Take back every request for a node that has not been given over to the job."""
    tools.call("scancel", f"--name={_request_name(job)}")


def _request_name(job: SlurmJob) -> str:
    return f"deadpool-grow-{job.slurm_id}"


def _allocate(job: SlurmJob, excluded: tuple[str, ...], wait_s: float, environment: dict[str, str]) -> str:
    command = [
        *("salloc", "--no-shell", "--nodes=1", f"--dependency=expand:{job.slurm_id}"),
        *(f"--job-name={_request_name(job)}", f"--exclude={','.join(excluded)}", *job.submit_options),
    ]
    if shutil.which(command[0]) is None:
        raise SlurmFailed("`salloc` is not on PATH here: no node can be asked for from inside this container")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(signal.SIGINT))
    try:
        said, _ = process.communicate(timeout=wait_s)
    except subprocess.TimeoutExpired:
        said = _take_back(process)
        raise SlurmFailed(f"no node came within {wait_s:g} s: {said.strip()}") from None
    found = _GRANTED.search(said)
    if process.returncode != 0 or found is None:
        hint = ""
        if "expan" in said.lower() or "dependency" in said.lower():
            hint = "; Slurm needs SchedulerParameters=permit_job_expansion for this"
        raise SlurmFailed(f"`{' '.join(command)}` ended with code {process.returncode}: {said.strip()}{hint}")
    return found[1]


def _take_back(process: subprocess.Popen[str]) -> str:
    """End `salloc` so that it takes its request back; returns what it said."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=TAKE_BACK_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # the request stays in the queue until `cancel_requests`
        return process.communicate()[0]


def _start_host(run_dir: Path, job: SlurmJob, node: str, environment: dict[str, str]) -> None:
    said = run_dir / f"{node}.srun.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # It lives as long as the host on the new node, and we do not: so no Popen, which wants to be waited for.
    pid = os.posix_spawnp(
        "srun",
        host_step(run_dir, job, node),
        {**environment, "SLURM_JOB_ID": job.slurm_id},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(said), flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    deadline_s = time.monotonic() + STEP_START_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            text = said.read_text(errors="replace").strip()
            raise SlurmFailed(f"the host on new node {node} ended at once (code {code}): {text}")
        time.sleep(0.1)
