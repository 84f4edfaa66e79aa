"""Hosts that are network namespaces of this machine on one bridge: each can be cut off silently, and healed.

Needs root and iproute2. The bridge is in a namespace of its own, the switch, where what serves all can run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

SWITCH = "switch"
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that nobody has: what is sent there is lost without a word."""

_HOSTS_FILES = Path("/etc/netns")


def why_not() -> str:
    """Why no namespaces can be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    probe = f"dp{os.getpid()}probe"
    try:
        _ip("netns", "add", probe)
    except subprocess.SubprocessError as error:
        return f"network namespaces cannot be made: {error}"
    _ip("netns", "del", probe)
    return ""


class Namespaces:
    """The switch and some hosts: 10.77.0.254, and 10.77.0.10 upwards on each host's eth0.

    Names of namespaces carry a mark, so that two of these do not meet. Addresses do not leave the namespaces.

    Args:
        hosts: short names, under which the hosts find one another.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.addresses = {host: f"10.77.0.{10 + index}" for index, host in enumerate(hosts)}
        self.addresses[SWITCH] = "10.77.0.254"
        mark = f"dp{secrets.token_hex(2)}"
        self._names = {host: f"{mark}{host}" for host in self.addresses}
        self._hosts = list(hosts)

    def start(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._make()
            undo.pop_all()

    def close(self) -> None:
        """End what runs in the namespaces, and the namespaces."""
        for name in self._names.values():
            shutil.rmtree(_HOSTS_FILES / name, ignore_errors=True)
            with contextlib.suppress(subprocess.SubprocessError):  # it was not made
                for pid in _ip("netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", name)

    def inside(self, host: str) -> list[str]:
        """Prefix of a command that is to run on a host, or on the switch."""
        return ["ip", "netns", "exec", self._names[host]]

    def cut_off(self, host: str) -> None:
        """A host reaches nobody any more: its cable is pulled at the switch."""
        _ip("-n", self._names[SWITCH], "link", "set", host, "down")

    def heal(self, host: str) -> None:
        """The cable is back."""
        _ip("-n", self._names[SWITCH], "link", "set", host, "up")

    def cut_link(self, a: str, b: str) -> None:
        """Nothing passes between two hosts any more, and nobody is told; both reach everybody else."""
        for here, there in ((a, b), (b, a)):
            entry = ("neigh", "replace", self.addresses[there], "lladdr", NOWHERE, "dev", "eth0")
            _ip("-n", self._names[here], *entry, "nud", "permanent")

    def _make(self) -> None:
        hosts_file = "127.0.0.1 localhost\n" + "".join(
            f"{address} {host}\n" for host, address in self.addresses.items()
        )
        for name in self._names.values():
            # Reverse look-ups of gloo stall for ten seconds each where no hosts file answers them.
            folder = _HOSTS_FILES / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(hosts_file)
            (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        switch = self._names[SWITCH]
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "addr", "add", f"{self.addresses[SWITCH]}/24", "dev", "br0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in self._hosts:
            name = self._names[host]
            _ip("-n", switch, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", host, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise subprocess.SubprocessError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
