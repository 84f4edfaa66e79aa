"""Submitting a job again after its warning signal, once, whoever does it."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from pathlib import Path

from deadpool.cli.slurm import tools
from deadpool.cli.slurm.job import SlurmJob

RESUBMITTED = "resubmitted"  # made by who submits, and filled with what the command said
OTHERS_S = tools.TOOL_TIMEOUT_S + 10.0  # who is first calls two commands, one of them quick
_POLL_S = 0.5


def submit_again(run_dir: Path, job: SlurmJob) -> None:
    """Submit the job again, once, however many nodes try; not if a person has cancelled it.

    Returns when that is done, by whomever: a caller may then end the job, and all who still submit with it.
    """
    if job.requeue in ("", "none"):
        tools.say("the job is not submitted again (--requeue none)")
        return
    mark = run_dir / RESUBMITTED
    try:
        if not mark.exists() and _was_cancelled(job.command_id):
            tools.say("the job was cancelled, so it is not submitted again")
            return
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        _wait_for_other(mark)
        return
    except tools.SlurmFailed as error:
        tools.say(f"submit the job again by hand: {error}")
        return
    try:
        said = _run(run_dir, job)
    except tools.SlurmSilent as error:
        mark.write_text("unknown\n")
        tools.say(
            f"the job may have been submitted again: look with `squeue --me` first, then by hand: {error}"
        )
        return
    except tools.SlurmFailed as error:
        mark.unlink()
        tools.say(f"submit the job again by hand: {error}")
        return
    mark.write_text(said)
    tools.say(f"submitted again: {said.strip()}")


def _wait_for_other(mark: Path) -> None:
    deadline_s = time.monotonic() + OTHERS_S
    with contextlib.suppress(FileNotFoundError):  # it failed, and said so
        while time.monotonic() < deadline_s and not mark.read_text():
            time.sleep(_POLL_S)


def _run(run_dir: Path, job: SlurmJob) -> str:
    # Under the same job id, the checkpoint folder is the same one.
    environment = {**tools.clean_environment(), "DEADPOOL_JOB_JOB_ID": job.decode_config().job.job_id}
    if job.requeue == "sbatch":
        nodes = f"--nodes={len(job.nodes)}"
        options = [nodes, *job.submit_options, f"--export={export_of(job.export)}"]
        if job.array is not None:  # this task alone, whatever the script says
            options.append(f"--array={job.array[1]}")
        script = str(run_dir / "job.sbatch")
        return tools.call("sbatch", "--parsable", *options, script, environment=environment)
    if job.requeue == "scontrol":
        tools.call("scontrol", "update", f"JobId={job.command_id}", "Requeue=1")
        tools.call("scontrol", "requeue", job.command_id)
        return f"{job.command_id}\n"
    return tools.call(*shlex.split(job.requeue), environment=environment)


def export_of(given: str) -> str:
    """Value of sbatch's `--export` for another submission: as this job was given it, and with the job id.

    Args:
        given: what sbatch told this job, in SLURM_EXPORT_ENV; "" for everything.
    """
    names = [] if given.upper() in ("NONE", "NIL") else (given or "ALL").split(",")
    return ",".join([*names, *{"DEADPOOL_JOB_JOB_ID"}.difference(names)])


def _was_cancelled(slurm_id: str) -> bool:
    """A warned job still runs; one that is being ended is out of time, was pre-empted, or cancelled."""
    shown = tools.show_job(slurm_id)
    if shown.get("JobState") == "RUNNING" or shown.get("PreemptTime", "None") != "None":
        return False
    return shown.get("JobState") != "TIMEOUT" and shown.get("Reason") != "TimeLimit"
