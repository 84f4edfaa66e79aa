"""`deadpool slurm wait`: the last command of the batch script. Its exit code is the job's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deadpool.cli.report import leave_reports, say
from deadpool.cli.slurm.ending import conclude, ignore_stop_signals, settle, wait_for_hosts
from deadpool.cli.slurm.job import read_job


def wait(run_dir: Path, pids: Sequence[int]) -> int:
    """Wait for the hosts of the job; returns its exit code.

    Args:
        run_dir: folder of this submission.
        pids: of the `srun` processes.
    """
    job = read_job(run_dir)
    config = job.decode_config()
    ignore_stop_signals()
    wait_for_hosts(run_dir, job, pids)
    code, reason = conclude(run_dir)
    say(f"{reason} (code {code}); run folder {run_dir}")
    settle(run_dir, job, code, reason)  # first: the time may be up, and reports of a large job take theirs
    leave_reports(run_dir, config, code, reason)
    return code
