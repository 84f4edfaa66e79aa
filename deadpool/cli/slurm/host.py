"""`deadpool slurm host`: one node of the job, as the one task of its step.

It runs the node's agent and, if this node has one, a member of etcd. Both are processes of their own: etcd
outlives a host that was lost, and serves the others until they have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from deadpool.cli.rundir import read_agents
from deadpool.cli.slurm import control_plane
from deadpool.cli.slurm.batch_host import end_without_batch_host
from deadpool.cli.slurm.ending import wait_for_members
from deadpool.cli.slurm.job import SlurmJob, domain_of, end_file, note_end, note_grown, read_job
from deadpool.errors import ConfigError, ExitCode, StoreUnavailable
from deadpool.runtime.launch import ENVIRONMENT

LINGER_S = 2.0  # of etcd, when the last member has gone: others have to see that, too


def run_host(run_dir: Path, environment: Mapping[str, str] = os.environ) -> int:
    """Run the host of this node to its end; returns its exit code."""
    job = read_job(run_dir)
    node = environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    signals = _Signals(job.warning_signal)
    is_return = come_back(run_dir, node)
    has_etcd = not is_return and any(member.node == node for member in job.etcd)
    try:
        with control_plane.serving(job, node, run_dir) if has_etcd else contextlib.nullcontext():
            code = _run_agent(job, node, run_dir, environment, signals)
            note_end(run_dir, node, code)
            end_without_batch_host(run_dir, job, node, code, signals.job_ends)
            if has_etcd and wait_for_members(run_dir, job, signals.job_ends):
                time.sleep(LINGER_S)
    except ConfigError:
        note_end(run_dir, node, int(ExitCode.BAD_INPUT))
        raise
    return code


def come_back(run_dir: Path, node: str) -> bool:
    """Whether the host of this node is started again, by hand: after `readmit`, or because it was killed.

    It then counts as a node that joins later, as the batch script waits for steps of its own only; and what
    is known of its former end is forgotten, so that others wait for it. Its member of etcd does not come
    back: the former host still serves it, or its data are gone, and without them it could vote twice.
    """
    end = end_file(run_dir, node)
    if not end.exists() and all(agent.host != node for agent in read_agents(run_dir)):
        return False
    note_grown(run_dir, node)
    end.unlink(missing_ok=True)
    return True


def _run_agent(
    job: SlurmJob, node: str, run_dir: Path, environment: Mapping[str, str], signals: _Signals
) -> int:
    config = job.decode_config()
    try:
        control_plane.wait_until_reachable(config.membership, control_plane.start_limit_s(len(job.nodes)))
    except StoreUnavailable as error:
        print(f"deadpool: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.CONTROL_PLANE_UNREACHABLE)
    if not config.run.domain:
        config = replace(config, run=replace(config.run, domain=domain_of(environment)))
    handover = {
        "config": config.to_bytes().hex(),
        "run_dir": str(run_dir),
        "host": node,
        "token": job.token,
        "parent": os.getpid(),
    }
    with signals.ignored_by_children():
        process = subprocess.Popen(
            [sys.executable, "-m", "deadpool.runtime.agent_main"],
            env={**environment, ENVIRONMENT: json.dumps(handover)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the warning signal reaches it once, through us
        )
    signals.forward_to(process)
    code = process.wait()
    signals.forward_to(None)
    return code if code >= 0 else 128 - code


class _Signals:
    """Hands SIGINT on as it is, SIGTERM and the warning signal as SIGTERM: then the agent saves its state.

    One that comes when the agent has ended says that Slurm is ending the job.
    """

    def __init__(self, warning: str) -> None:
        self.job_ends = threading.Event()
        self._warning = signal.Signals[f"SIG{warning}"]
        self._process: subprocess.Popen[bytes] | None = None
        self._has_begun = False
        self._early = 0  # arrived before the agent was there
        for number in {signal.SIGINT, signal.SIGTERM, self._warning}:
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def ignored_by_children(self) -> Iterator[None]:
        """Slurm may signal every process of a step, and USR1 would end those that do not expect it."""
        if self._warning in (signal.SIGTERM, signal.SIGINT):
            yield  # agents and workers know these
            return
        handler = signal.signal(self._warning, signal.SIG_IGN)  # inherited, through exec, too
        try:
            yield
        finally:
            signal.signal(self._warning, handler)

    def forward_to(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process
        self._has_begun = True
        if process is not None and self._early:
            process.send_signal(self._early)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if self._process is not None:
            self._process.send_signal(sent)
        elif self._has_begun:
            self.job_ends.set()
        else:
            self._early = sent
