"""`deadpool run --standalone`: an embedded etcd and all hosts of the job on this machine.

Each host is a process of its own (its agent), exactly as on several machines; only etcd and the addresses
differ. A host that is lost stays lost, unless `--respawn` asks for a new incarnation.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from deadpool.config import Config
from deadpool.errors import ExitCode
from deadpool.liveness.process import ProcessWatch
from deadpool.liveness.stat import state_of
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.runtime.result import read_result
from deadpool.runtime.worker import die_with_parent

ENVIRONMENT = "DEADPOOL_AGENT"
END_GRACE_S = 10.0  # after the first host ended: how long hosts that are not in the final View may take
REAP_LIMIT_S = 5.0  # a killed process that takes longer is stuck in the kernel
STOP_GRACE_S = 15.0  # after Ctrl-C or SIGTERM
TICK_S = 0.25
RESPAWN_LIMIT = 1000
_END_ALL = {int(ExitCode.BAD_INPUT), int(ExitCode.CONTROL_PLANE_UNREACHABLE)}
"""Codes of a host with which every other one would end, too."""


@dataclass(slots=True)
class _Host:
    index: int
    process: subprocess.Popen[bytes]
    code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a standalone run ended."""

    exit_code: int
    reason: str


class StandaloneRun:
    """Starts and watches the agents of a standalone job.

    Args:
        config: complete configuration; `membership.etcd` is filled in here.
        run_dir: folder of the run, made by the caller.
        token: the job's token.
        on_started: called with the endpoint of the embedded etcd once it answers.
    """

    def __init__(
        self, config: Config, run_dir: Path, token: str, *, on_started: Callable[[str], None]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._token = token
        self._on_started = on_started
        self._hosts: list[_Host] = []
        self._exits: queue.SimpleQueue[tuple[_Host, int]] = queue.SimpleQueue()
        self._signal = 0
        self._respawns = 0

    def run(self) -> Outcome:
        """Run to the end; never raises for a failure of the job itself."""
        watch = ProcessWatch()
        previous = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with EmbeddedEtcd(self._run_dir / "etcd") as etcd:
                membership = replace(self._config.membership, etcd=(etcd.endpoint,))
                self._config = replace(self._config, membership=membership)
                self._on_started(etcd.endpoint)
                for index in range(self._config.job.nnodes + self._config.job.spares):
                    self._start(index, watch)
                try:
                    return self._watch_hosts(watch)
                finally:
                    self._kill_rest()
        finally:
            watch.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    # ---- hosts ---------------------------------------------------------------------------------------

    def _start(self, index: int, watch: ProcessWatch) -> None:
        is_first = all(host.index != index for host in self._hosts)
        wish = index if is_first and index < self._config.job.nnodes else None
        config = replace(self._config, run=replace(self._config.run, node_rank=wish))
        handover = {
            "config": config.to_bytes().hex(),
            "run_dir": str(self._run_dir),
            "host": f"h{index}",
            "token": self._token,
            "parent": os.getpid(),
        }
        environment = dict(os.environ)
        environment[ENVIRONMENT] = json.dumps(handover)
        process = subprocess.Popen(
            [sys.executable, "-m", "deadpool.runtime.agent_main"],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which tells the agents in order
        )
        host = _Host(index, process)
        self._hosts.append(host)
        watch.add(process.pid, lambda pid, status: self._exits.put((host, pid)))

    def _watch_hosts(self, watch: ProcessWatch) -> Outcome:
        while True:
            self._collect(TICK_S, watch)
            if self._signal:
                return self._stop_for_signal(watch)
            codes = {host.code for host in self._hosts}
            if (self._run_dir / "result.json").exists() or codes & _END_ALL:
                return self._let_end(watch)
            if all(host.code is not None for host in self._hosts):
                failed = [code for code in codes if code is not None and code > 0]
                if failed:
                    return Outcome(exit_code=failed[0], reason="every host ended; see above")
                if codes == {0}:  # the run folder took no result.json
                    return Outcome(exit_code=0, reason="every host ended in order")
                return Outcome(
                    exit_code=int(ExitCode.STATE_LOST),
                    reason="every host of the job was killed; no copy is left",
                )

    def _collect(self, timeout_s: float, watch: ProcessWatch) -> None:
        try:
            host, _ = self._exits.get(timeout=timeout_s)
        except queue.Empty:
            return
        host.process.wait()
        host.code = host.process.returncode
        if host.code < 0 and self._config.run.respawn and not self._signal and self._respawns < RESPAWN_LIMIT:
            self._respawns += 1
            self._start(host.index, watch)

    def _let_end(self, watch: ProcessWatch) -> Outcome:
        """One host ended in order. Hosts of the final View may finish their scripts; others get a bound."""
        result = read_result(self._run_dir)
        deadline = time.monotonic() + END_GRACE_S
        finals = set(result.pids)
        while True:
            alive = [host for host in self._hosts if host.code is None]
            waiting = [host for host in alive if host.process.pid in finals]
            if not alive or (not waiting and time.monotonic() > deadline) or self._signal:
                break
            if not waiting and all(_is_stopped(host.process.pid) for host in alive):
                break  # silently stopped hosts that were replaced: nothing to wait for
            self._collect(TICK_S, watch)
        # A spare that was turned away fails nothing: only hosts of the final View say how the job ended.
        counted = [host for host in self._hosts if not finals or host.process.pid in finals]
        codes = [host.code for host in counted if host.code is not None and host.code > 0]
        code = result.exit_code or next(iter(codes), 0)
        return Outcome(exit_code=code, reason=result.reason)

    def _stop_for_signal(self, watch: ProcessWatch) -> Outcome:
        for host in self._hosts:
            if host.code is None:
                host.process.send_signal(self._signal)
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline:
            alive = [host for host in self._hosts if host.code is None]
            if not alive or all(_is_stopped(host.process.pid) for host in alive):
                break
            self._collect(TICK_S, watch)
        if self._signal == signal.SIGINT:
            return Outcome(exit_code=int(ExitCode.INTERRUPTED), reason="Ctrl-C")
        return Outcome(exit_code=int(ExitCode.TERMINATED), reason="SIGTERM")

    def _kill_rest(self) -> None:
        for host in self._hosts:
            if host.process.poll() is None:
                host.process.kill()
        for host in self._hosts:
            try:
                host.process.wait(REAP_LIMIT_S)
            except subprocess.TimeoutExpired:  # in an uninterruptible call: it ends with it
                print(f"deadpool: host h{host.index} (pid {host.process.pid}) is killed and still there")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def _is_stopped(pid: int) -> bool:
    """Stopped by a signal, or gone."""
    return state_of(pid) in ("", "T", "Z", "X")


def agent_handover() -> tuple[Config, Path, str, str]:
    """In the agent process: what the launcher handed over (config, run folder, host label, token)."""
    handover = json.loads(os.environ.pop(ENVIRONMENT))
    die_with_parent(handover["parent"])
    config = Config.from_bytes(bytes.fromhex(handover["config"]))
    return config, Path(handover["run_dir"]), handover["host"], handover["token"]
