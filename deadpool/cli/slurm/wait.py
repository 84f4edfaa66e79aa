"""`deadpool slurm wait`: the last command of the batch script. Its exit code is the job's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deadpool.cli.report import build_report, print_timeline, write_report
from deadpool.cli.rundir import merge_events
from deadpool.cli.slurm.ending import conclude, ignore_stop_signals, settle, wait_for_hosts
from deadpool.cli.slurm.job import read_job
from deadpool.config import Config


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
    print(f"deadpool: {reason} (code {code}); run folder {run_dir}", file=sys.stderr, flush=True)
    settle(
        run_dir, job, code, reason
    )  # first: the time may be up, and the report of a large job takes its own
    try:
        _report(run_dir, config)
    except OSError as error:
        print(f"deadpool: there is no report of this run: {error}", file=sys.stderr, flush=True)
    return code


def _report(run_dir: Path, config: Config) -> None:
    report = build_report(run_dir, config)
    if report.recoveries:
        print_timeline(report)
    if config.run.report:
        write_report(report, Path(config.run.report))
    if config.run.events:
        merge_events(run_dir, Path(config.run.events))
