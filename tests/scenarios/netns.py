"""A job whose hosts are network namespaces: `deadpool run` on each, and etcd on the switch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deadpool.membership.embedded import find_etcd
from tests.namespaces import SWITCH, Namespaces


class Network:
    """`n` hosts h0, h1, ... on one bridge, and the processes on them."""

    def __init__(self, n: int) -> None:
        self._namespaces = Namespaces([f"h{index}" for index in range(n)])
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        self._namespaces.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._namespaces.close()

    def start_etcd(self, folder: Path) -> str:
        """Returns the endpoint; it answers a moment later."""
        address = self._namespaces.addresses[SWITCH]
        url, peer = f"http://{address}:2379", f"http://{address}:2380"
        command = [
            *(find_etcd(), "--name", "one", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"one={peer}", "--log-level", "error"),
        ]
        self._start(SWITCH, command, folder / "etcd.txt")
        return f"{address}:2379"

    def start_host(
        self, index: int, options: Sequence[str], output: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """One `deadpool run`."""
        command = [sys.executable, "-m", "deadpool", "run", *options]
        return self._start(f"h{index}", command, output, **environment)

    def run_on_switch(self, *command: str, limit_s: float = 30.0) -> str:
        """Run a command that succeeds to its end; returns what it wrote to stdout."""
        done = subprocess.run(
            [*self._namespaces.inside(SWITCH), *command],
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            check=True,
        )
        return done.stdout

    def cut_link(self, a: int, b: int) -> None:
        """Nothing passes between two hosts any more, and nobody is told; both reach everybody else."""
        self._namespaces.cut_link(f"h{a}", f"h{b}")

    def cut_off(self, index: int) -> None:
        """A host reaches nobody any more."""
        self._namespaces.cut_off(f"h{index}")

    def heal(self, index: int) -> None:
        self._namespaces.heal(f"h{index}")

    def _start(
        self, host: str, command: Sequence[str], output: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a process under the host's own name."""
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [
                    *(*self._namespaces.inside(host), "unshare", "--uts", "sh", "-c"),
                    *('hostname "$0" && exec "$@"', host, *command),
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment},
            )
        self._processes.append(process)
        return process
