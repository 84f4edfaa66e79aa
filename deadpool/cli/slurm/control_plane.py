"""The etcd inside the allocation: three members on three nodes, one where there are fewer.

It serves this job alone and ends with it. Its data are on the node's own disk: an etcd that waits for a
parallel file system misses its elections.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deadpool.cli.slurm.job import EtcdNode, SlurmJob
from deadpool.cli.slurm.tools import SlurmFailed, call
from deadpool.config import MembershipConfig
from deadpool.errors import ConfigError, IntegrationError, StoreUnavailable
from deadpool.membership.embedded import EXEC_BOUND_TO_PARENT, find_etcd, free_ports
from deadpool.membership.etcd import UNSAFE_VERSIONS, EtcdStore
from deadpool.runtime.endpoints import etcd_config

MEMBERS = 3
UNSAFE_WARNING = (
    "the etcd that came with DeadPool (3.5.1) can lose consistency when it is killed (etcd-io/etcd#13766): "
    "put etcd 3.5.6 or newer on PATH, or name it by DEADPOOL_ETCD_BIN"
)
START_LIMIT_S = 120.0
STEPS_PER_S = 2.0  # that Slurm starts, where it limits its users' calls (rl_enable)
_POLL_S = 0.2
_RESTART_PAUSE_S = 0.5
_VERSION_LIMIT_S = 10.0
_VALID_DAYS = 366


def choose_members(nodes: Sequence[str], addresses: dict[str, str]) -> tuple[EtcdNode, ...]:
    """Nodes that carry etcd, spread over the list: its neighbours are often neighbours in a rack.

    Args:
        nodes: of the allocation.
        addresses: IP address of each.
    """
    count = MEMBERS if len(nodes) >= MEMBERS else 1
    chosen = [nodes[index * len(nodes) // count] for index in range(count)]
    # Free here is most likely free there, too; a member without its port is missed by nobody.
    ports = free_ports(2 * count)
    return tuple(
        EtcdNode(
            node=node, address=addresses[node], client_port=ports[2 * index], peer_port=ports[2 * index + 1]
        )
        for index, node in enumerate(chosen)
    )


def make_tls(folder: Path, addresses: Sequence[str]) -> MembershipConfig:
    """Make an authority for this job and one certificate for its servers and clients; returns the settings.

    Raises:
        ConfigError: there is no `openssl` program, or it failed.
    """
    folder.mkdir(mode=0o700)
    names = ",".join(f"IP:{address}" for address in dict.fromkeys(addresses))
    (folder / "names").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    days = ("-days", str(_VALID_DAYS))

    def openssl(*arguments: str) -> None:
        command = [str(folder / each[1:]) if each.startswith("@") else each for each in arguments]
        call("openssl", *command)

    try:
        openssl("req", "-x509", *key, *days, "-subj", "/CN=deadpool", "-keyout", "@ca.key", "-out", "@ca.crt")
        openssl("req", *key, "-subj", "/CN=deadpool-job", "-keyout", "@job.key", "-out", "@job.csr")
        openssl(
            *("x509", "-req", "-in", "@job.csr", "-CA", "@ca.crt", "-CAkey", "@ca.key", "-CAcreateserial"),
            *(*days, "-extfile", "@names", "-out", "@job.crt"),
        )
    except SlurmFailed as error:
        raise ConfigError(
            [f"no TLS certificates for etcd: {error}; install openssl, or name an etcd by DEADPOOL_ETCD"]
        ) from error
    for name in ("ca.key", "job.csr", "names", "ca.srl"):
        (folder / name).unlink(missing_ok=True)
    (folder / "job.key").chmod(0o600)
    return MembershipConfig(
        ca=str(folder / "ca.crt"), cert=str(folder / "job.crt"), key=str(folder / "job.key")
    )


def find_program() -> tuple[str, str]:
    """The etcd program and what to warn of: DEADPOOL_ETCD_BIN, else PATH, else the embedded one.

    Raises:
        ConfigError: there is none.
    """
    named = os.environ.get("DEADPOOL_ETCD_BIN", "")
    if named and not os.access(named, os.X_OK):
        raise ConfigError([f"DEADPOOL_ETCD_BIN={named} is not a program"])
    program = named or shutil.which("etcd") or ""
    if not named and Path(program).parent == Path(sys.executable).parent:
        program = ""  # a script that pip made for the embedded one: a process between us and etcd
    if not program:
        try:
            return find_etcd(), UNSAFE_WARNING
        except IntegrationError as error:
            raise ConfigError(
                [
                    "no etcd program: put `etcd` on PATH, name it by DEADPOOL_ETCD_BIN, name a running etcd "
                    "by DEADPOOL_ETCD, or pip install 'deadpool[embedded]'"
                ]
            ) from error
    version = version_of(program)
    warning = f"{program} is etcd {version}: " if version else f"{program} does not tell its version: "
    if version in UNSAFE_VERSIONS:
        return program, f"{warning}it can lose consistency when a server is killed; use 3.5.6 or newer"
    return program, "" if version else f"{warning}use 3.5.6 or newer, or 3.4.22 or newer"


def version_of(program: str) -> str:
    """Version of an etcd program; "" if it does not tell."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_VERSION_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"etcd Version: (\S+)", done.stdout)
    return found[1] if found else ""


@contextlib.contextmanager
def serving(job: SlurmJob, node: str, run_dir: Path) -> Iterator[None]:
    """Run this node's member of etcd during the block, if it has one.

    Raises:
        ConfigError: there is no etcd program.
    """
    own = next((member for member in job.etcd if member.node == node), None)
    if own is None:
        yield
        return
    program, warning = find_program()
    if warning:
        print(f"deadpool: {warning}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="deadpool-etcd-", ignore_cleanup_errors=True) as data:
        server = _Server([program, *_arguments(job, own), "--data-dir", data], run_dir / f"etcd-{node}.log")
        try:
            yield
        finally:
            server.close()


class _Server:
    """A server process that is started again when it ends.

    Slurm may hand a signal for a step to every process in it, so the warning signal ends etcd, too, just when
    the agents need it.

    Args:
        command: of the server.
        log: file for what it has to say.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = [sys.executable, "-I", "-S", "-c", EXEC_BOUND_TO_PARENT, str(os.getpid()), *command]
        self._log = log
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        # The server dies with the thread that started it, not only with this process.
        self._thread = threading.Thread(target=self._keep, name="etcd")
        self._thread.start()

    def close(self) -> None:
        """End the server for good; what it knows is thrown away, so it need not end in order."""
        with self._lock:
            self._closing.set()
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _keep(self) -> None:
        while not self._closing.is_set():
            with open(self._log, "ab") as log, self._lock:
                if self._closing.is_set():
                    return
                # A session of its own: Ctrl-C at the terminal is for the agent, which still needs etcd.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            self._process.wait()
            self._closing.wait(_RESTART_PAUSE_S)


def _arguments(job: SlurmJob, own: EtcdNode) -> list[str]:
    tls = job.decode_config().membership
    client, peer = f"https://{own.endpoint}", f"https://{own.address}:{own.peer_port}"
    cluster = ",".join(f"{each.node}=https://{each.address}:{each.peer_port}" for each in job.etcd)
    return [
        *("--name", own.node, "--initial-cluster", cluster, "--initial-cluster-state", "new"),
        *("--initial-cluster-token", f"deadpool-{job.slurm_id}"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--cert-file", tls.cert, "--key-file", tls.key, "--trusted-ca-file", tls.ca, "--client-cert-auth"),
        *("--peer-cert-file", tls.cert, "--peer-key-file", tls.key, "--peer-trusted-ca-file", tls.ca),
        *("--peer-client-cert-auth", "--heartbeat-interval", "100", "--election-timeout", "1000"),
        *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "1000"),
        *("--logger", "zap", "--log-level", "error"),
    ]


def start_limit_s(n_nodes: int) -> float:
    """How long a node waits for etcd, whose members may be on nodes that start last."""
    return START_LIMIT_S + n_nodes / STEPS_PER_S


def wait_until_reachable(config: MembershipConfig, limit_s: float = START_LIMIT_S) -> None:
    """Return once etcd answers with a quorum.

    Raises:
        StoreUnavailable: not within the limit.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        store = EtcdStore(etcd_config(config))
        try:
            store.connect()
            return
        except StoreUnavailable as error:
            if time.monotonic() > deadline_s:
                raise StoreUnavailable(
                    f"etcd did not come up within {limit_s:g} s ({', '.join(config.etcd)}): {error}"
                ) from error
        finally:
            store.close()
        time.sleep(_POLL_S)


def address_of(name: str, others: Sequence[str] = ()) -> str:
    """IP address of a node as other nodes see it.

    A node's own name often resolves to loopback on that node; the address it uses towards another one counts.

    Raises:
        ConfigError: the name cannot be resolved.
    """
    try:
        address = socket.gethostbyname(name)
        if address.startswith("127."):
            for other in (socket.gethostbyname(each) for each in others):
                if not other.startswith("127."):
                    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                        probe.connect((other, 9))  # sends nothing
                        return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError([f"node address {name!r} cannot be resolved here: {error}"]) from error
    return address
