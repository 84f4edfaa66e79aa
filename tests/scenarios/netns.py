"""Hosts that are network namespaces on one bridge: links between them can be cut silently, and healed.

Needs root and iproute2. A switch namespace has the bridge and etcd; each host has one address on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deadpool.membership.embedded import find_etcd

SWITCH_ADDRESS = "10.77.0.254"
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that nobody has: what is sent there is lost without a word."""


def why_not() -> str:
    """Why no namespaces can be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    probe = f"dp{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=10)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True, timeout=10)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


class Network:
    """`n` hosts on one bridge.

    Names carry this process' id, so that two of these do not meet. Addresses do not leave the namespaces.
    """

    def __init__(self, n: int) -> None:
        self._switch = f"dp{os.getpid()}sw"
        self._hosts = [f"dp{os.getpid()}h{index}" for index in range(n)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as undo:
            undo.callback(self._delete)
            self._make()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._delete()

    def address(self, index: int) -> str:
        return f"10.77.0.{10 + index}"

    def start(
        self, index: int | None, command: Sequence[str], output: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host (None: on the switch), under the host's own name."""
        name = self._switch if index is None else self._hosts[index]
        label = "switch" if index is None else f"h{index}"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"),
                    *('hostname "$0" && exec "$@"', label, *command),
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment},
            )
        self.processes.append(process)
        return process

    def start_etcd(self, folder: Path) -> str:
        """Returns the endpoint; it answers a moment later."""
        url, peer = f"http://{SWITCH_ADDRESS}:2379", f"http://{SWITCH_ADDRESS}:2380"
        command = [
            *(find_etcd(), "--name", "one", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"one={peer}", "--log-level", "error"),
        ]
        self.start(None, command, folder / "etcd.txt")
        return f"{SWITCH_ADDRESS}:2379"

    def start_host(
        self, index: int, options: Sequence[str], output: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """One `deadpool run`."""
        return self.start(index, [sys.executable, "-m", "deadpool", "run", *options], output, **environment)

    def run(self, index: int | None, *command: str, limit_s: float = 30.0) -> str:
        """Run a command on a host to its end; returns what it wrote to stdout."""
        name = self._switch if index is None else self._hosts[index]
        done = subprocess.run(
            ["ip", "netns", "exec", name, *command], capture_output=True, text=True, timeout=limit_s
        )
        return done.stdout

    def cut_link(self, a: int, b: int) -> None:
        """Nothing passes between two hosts any more, and nobody is told; both reach everybody else."""
        for here, there in ((a, b), (b, a)):
            entry = ("neigh", "replace", self.address(there), "lladdr", NOWHERE, "dev", "eth0")
            _ip("-n", self._hosts[here], *entry, "nud", "permanent")

    def cut_off(self, index: int) -> None:
        """A host reaches nobody any more: its cable is pulled at the switch."""
        _ip("-n", self._switch, "link", "set", f"p{index}", "down")

    def heal(self, index: int) -> None:
        """The cable is back."""
        _ip("-n", self._switch, "link", "set", f"p{index}", "up")

    def _make(self) -> None:
        lines = ["127.0.0.1 localhost", f"{SWITCH_ADDRESS} switch"]
        lines += [f"{self.address(index)} h{index}" for index in range(len(self._hosts))]
        for name in (self._switch, *self._hosts):
            # Reverse look-ups of gloo stall for ten seconds each where no hosts file answers them.
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "br0")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for index, name in enumerate(self._hosts):
            pair = ("link", "add", f"p{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, *pair)
            _ip("-n", self._switch, "link", "set", f"p{index}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def _delete(self) -> None:
        for name in (self._switch, *self._hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@contextlib.contextmanager
def network(n: int) -> Iterator[Network]:
    """`n` hosts for the length of a block."""
    with Network(n) as made:
        yield made
