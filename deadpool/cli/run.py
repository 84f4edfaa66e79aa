"""`deadpool run`: all hosts of a job on this machine (`--standalone`), or this machine's own host."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from deadpool.cli.jobs import JobFile, job_file, note_token, write_job_file
from deadpool.cli.report import leave_reports, say
from deadpool.config import Config
from deadpool.errors import ConfigError
from deadpool.membership.embedded import EMBEDDED_WARNING
from deadpool.runtime.endpoints import etcd_config
from deadpool.runtime.network import loopback_warnings, network_problems

FALLBACK_WARNING = (
    "the C++ extension is not built, communicators run on the fallback in Python: gloo only, and an abort "
    "waits for the GIL (docs/fallback.md); install a C++ compiler and DeadPool again, --no-build-isolation"
)


def run_command(config: Config) -> int:
    """Run the job; returns the exit code of docs/exit-codes.md.

    Raises:
        ConfigError: what can be seen before anything is started.
    """
    problems = network_problems(os.environ)
    if not config.run.standalone:
        problems += etcd_config(config.membership).problems()
        if not config.job.job_id:
            problems.append("give --job-id, the same on every host: it is how the hosts of a job meet")
    if problems:
        raise ConfigError(problems)
    job_id = config.job.job_id or f"job-{secrets.token_hex(4)}"
    config = replace(config, job=replace(config.job, job_id=job_id))
    run_dir = _make_run_dir(config)
    print(f"deadpool: limits, the shortest first: {config.describe_limits()}", file=sys.stderr)
    # Looked for, not loaded: that would take torch.
    if importlib.util.find_spec("deadpool.communicator._native") is None:
        print(f"deadpool: {FALLBACK_WARNING}", file=sys.stderr, flush=True)
    if config.run.standalone:
        return _run_standalone(config, run_dir)
    code = _run_host(config, run_dir)
    leave_reports(run_dir, config, code, shows_timeline=False)
    return code


def _run_standalone(config: Config, run_dir: Path) -> int:
    from deadpool.runtime.launch import StandaloneRun

    print(f"deadpool: {EMBEDDED_WARNING}", file=sys.stderr)
    token = secrets.token_hex(16)

    job_files: list[Path] = []

    def write_file(endpoint: str) -> None:
        job = JobFile(
            job_id=config.job.job_id, token=token, run_dir=str(run_dir), pid=os.getpid(), etcd=(endpoint,)
        )
        job_files.append(write_job_file(job))

    started_s = time.monotonic()
    try:
        outcome = StandaloneRun(config, run_dir, token, on_started=write_file).run()
    finally:
        for path in job_files:
            path.unlink(missing_ok=True)
    code, seconds = outcome.exit_code, time.monotonic() - started_s
    say(f"{outcome.reason} (code {code}, {seconds:.1f} s); run folder {run_dir}")
    leave_reports(run_dir, config, code, outcome.reason)
    return code


def _run_host(config: Config, run_dir: Path) -> int:
    from deadpool.runtime.agent_process import run_agent

    for warning in loopback_warnings(config, os.environ):
        print(f"deadpool: {warning}", file=sys.stderr)
    token = secrets.token_hex(16)  # the job's own is that of the agent which came first
    label = f"{socket.gethostname().split('.')[0]}"
    job = _job_of_host(config, run_dir)
    with job_file(job):
        return run_agent(config, run_dir, label, token, on_token=partial(note_token, job))


def _job_of_host(config: Config, run_dir: Path) -> JobFile:
    """What `deadpool status` on this machine needs to ask etcd, which knows the rest."""
    membership = config.membership
    ca, cert, key = (
        str(Path(file).absolute()) if file else ""
        for file in (membership.ca, membership.cert, membership.key)
    )
    return JobFile(
        job_id=config.job.job_id,
        token="",  # etcd's counts: see note_token
        run_dir=str(run_dir),
        pid=os.getpid(),
        etcd=membership.etcd,
        ca=ca,
        cert=cert,
        key=key,
        user=membership.user,
        password=membership.password,
    )


def _make_run_dir(config: Config) -> Path:
    folder = Path(config.run.run_dir or Path("deadpool-runs") / config.job.job_id).absolute()
    if config.run.standalone and (folder / "result.json").exists():
        raise ConfigError([f"{folder} holds another run: give another --run-dir or --job-id"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"run folder {folder} cannot be made: {error.strerror}"]) from error
    return folder
