"""What the contract tests share: both stores behind one face, a recorder of events, a link to cut."""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from deadpool.core.types import Member, Phase, View
from deadpool.errors import StoreUnavailable
from deadpool.membership.embedded import EmbeddedEtcd, find_etcd, free_ports
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.membership.memory import MemoryServer, MemoryStore
from deadpool.membership.records import JobClaim
from deadpool.membership.registry import Registry
from deadpool.membership.store import Lease, MembershipStore

TTL_S = 1.0
EVENT_S = 10.0
TOKEN = "secret"
START_S = 15.0
_T = TypeVar("_T")


class Recorder:
    """Collects events; a test waits for the one it names."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, kind: type[_T], check: Callable[[_T], bool] = lambda _: True, *, after: int = 0) -> _T:
        """The first event of this kind that passes the check, among those from number `after` on."""

        def find() -> _T | None:
            found = (each for each in self.events[after:] if isinstance(each, kind) and check(each))
            return next(found, None)

        with self._changed:
            event = self._changed.wait_for(find, EVENT_S)
        assert event is not None, f"no such {kind.__name__} within {EVENT_S} s; there came {self.events}"
        return event


class Link:
    """A TCP relay to one server that a test can cut: open connections end, new ones end at once."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_cut = False
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="link")
        self._thread.start()

    @property
    def endpoint(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for peer in list(self._peers):
                self._drop(peer)

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._is_closed = True
        self._wake.send(b".")
        self._thread.join()
        for each in (self._listener, self._wake, self._woken):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._peers:
                        self._relay(key.fileobj)

    def _accept(self) -> None:
        ours, _ = self._listener.accept()
        try:
            theirs = None if self._is_cut else socket.create_connection(self._target, timeout=1.0)
        except OSError:
            theirs = None
        if theirs is None:
            ours.close()
            return
        for one, other in ((ours, theirs), (theirs, ours)):
            one.settimeout(1.0)
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _relay(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            self._peers[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(source)

    def _drop(self, one: socket.socket) -> None:
        other = self._peers.pop(one, None)
        if other is not None:
            self._peers.pop(other, None)
            for each in (one, other):
                with suppress(KeyError, ValueError):
                    self._selector.unregister(each)
                each.close()


class EtcdProcess:
    """An etcd server with options that the embedded one does not have."""

    def __init__(self, config: EtcdConfig, arguments: list[str], log_file: Path) -> None:
        self.config = config
        self._arguments = arguments
        self._log_file = log_file
        self.start()

    def start(self) -> None:
        with open(self._log_file, "ab") as log:
            self._process = subprocess.Popen([find_etcd(), *self._arguments], stdout=log, stderr=log)

    @property
    def endpoint(self) -> str:
        return self.config.endpoints[0]

    @classmethod
    def start_one(cls, folder: Path, *options: str, config: EtcdConfig | None = None) -> EtcdProcess:
        (server,) = cls.start_cluster(folder, 1, *options, config=config)
        return server

    @classmethod
    def start_cluster(
        cls, folder: Path, n_servers: int, *options: str, config: EtcdConfig | None = None
    ) -> list[EtcdProcess]:
        """Start servers, each with its own client, and wait until each answers."""
        ports = free_ports(2 * n_servers)
        clients, peers = ports[:n_servers], ports[n_servers:]
        scheme = "https" if config is not None and config.ca_file is not None else "http"
        cluster = ",".join(f"s{each}=http://127.0.0.1:{peers[each]}" for each in range(n_servers))
        servers = []
        for each in range(n_servers):
            client_url, peer_url = f"{scheme}://127.0.0.1:{clients[each]}", f"http://127.0.0.1:{peers[each]}"
            arguments = [
                *("--name", f"s{each}", "--data-dir", str(folder / f"s{each}"), "--unsafe-no-fsync"),
                *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
                *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
                *("--initial-cluster", cluster, "--heartbeat-interval", "50", "--election-timeout", "500"),
                *("--grpc-keepalive-min-time", "500ms", "--log-level", "error", *options),
            ]
            own = replace(
                config or etcd_config(), endpoints=(f"127.0.0.1:{clients[each]}",), call_timeout_s=10.0
            )
            servers.append(cls(own, arguments, folder / f"s{each}.log"))
        try:
            for server in servers:
                server.wait_until_up()
        except StoreUnavailable:
            for server in servers:
                server.close()
            raise
        return servers

    def wait_until_up(self) -> None:
        give_up_s = time.monotonic() + START_S
        while True:
            try:
                with EtcdStore(self.config):
                    return
            except StoreUnavailable:
                if time.monotonic() > give_up_s:
                    raise

    def control(self, *arguments: str) -> None:
        run_etcdctl(self.endpoint, *_tls_options(self.config), *arguments)

    def leads(self) -> bool:
        (answer,) = json.loads(run_etcdctl(self.endpoint, "endpoint", "status", "-w", "json"))
        return bool(answer["Status"]["leader"] == answer["Status"]["header"]["member_id"])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()


def add_users(server: EtcdProcess) -> None:
    """From now on the server asks for a password: `trainer` has what a job needs, and nothing else."""
    for command in (
        ("user", "add", "root:root-password"),
        ("user", "grant-role", "root", "root"),
        ("user", "add", "trainer:secret"),
        ("role", "add", "trainer"),
        ("role", "grant-permission", "trainer", "--prefix=true", "readwrite", "/deadpool/"),
        ("user", "grant-role", "trainer", "trainer"),
        ("auth", "enable"),
    ):
        server.control(*command)


def tls_options(folder: Path) -> tuple[str, ...]:
    """Options of a server that speaks TLS only, and only to clients with a certificate."""
    return (
        *("--cert-file", str(folder / "server.crt"), "--key-file", str(folder / "server.key")),
        *("--trusted-ca-file", str(folder / "ca.crt"), "--client-cert-auth"),
    )


def _tls_options(config: EtcdConfig) -> list[str]:
    files = {"--cacert": config.ca_file, "--cert": config.cert_file, "--key": config.key_file}
    return [word for option, path in files.items() if path is not None for word in (option, str(path))]


def run_etcdctl(endpoint: str, *arguments: str) -> bytes:
    program = str(Path(find_etcd()).with_name("etcdctl"))
    command = [program, "--endpoints", endpoint, *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=30).stdout


class Backend(ABC):
    """One implementation under test: a server, and clients of it."""

    @abstractmethod
    def open_store(self) -> MembershipStore:
        """A new connected client."""

    @abstractmethod
    def cut_off(self, store: MembershipStore) -> None:
        """Separate one client from the server."""

    @abstractmethod
    def let_back(self, store: MembershipStore) -> None: ...

    @abstractmethod
    def compact(self) -> None:
        """Let the server forget its history."""

    @abstractmethod
    def pass_time(self, seconds: float) -> None: ...

    @abstractmethod
    def now_s(self) -> float:
        """The clock by which leases end."""

    @abstractmethod
    def close(self) -> None: ...


class MemoryBackend(Backend):
    def __init__(self) -> None:
        self.server = MemoryServer()
        self._stores: list[MemoryStore] = []

    def open_store(self) -> MemoryStore:
        self._stores.append(MemoryStore(self.server))
        self._stores[-1].connect()
        return self._stores[-1]

    def cut_off(self, store: MembershipStore) -> None:
        assert isinstance(store, MemoryStore)
        store.set_reachable(False)

    def let_back(self, store: MembershipStore) -> None:
        assert isinstance(store, MemoryStore)
        store.set_reachable(True)

    def compact(self) -> None:
        self.server.compact()

    def pass_time(self, seconds: float) -> None:
        self.server.advance(seconds)

    def now_s(self) -> float:
        return self.server.now_s

    def close(self) -> None:
        for store in self._stores:
            store.close()


class EtcdBackend(Backend):
    def __init__(self, server: EmbeddedEtcd) -> None:
        self.server = server
        self._links: dict[MembershipStore, Link] = {}

    def open_store(self) -> EtcdStore:
        host, _, port = self.server.endpoint.rpartition(":")
        link = Link((host, int(port)))
        store = EtcdStore(etcd_config(link.endpoint))
        self._links[store] = link
        store.connect()
        return store

    def cut_off(self, store: MembershipStore) -> None:
        self._links[store].cut()

    def let_back(self, store: MembershipStore) -> None:
        self._links[store].mend()

    def compact(self) -> None:
        with EtcdStore(etcd_config(self.server.endpoint)) as store:
            _, revision = store.get_prefix("/deadpool/")
        run_etcdctl(self.server.endpoint, "compact", str(revision))

    def pass_time(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        for store in self._links:
            store.close()
        for link in self._links.values():
            link.close()


def etcd_config(*endpoints: str) -> EtcdConfig:
    """Short deadlines, and pings as frequent as the embedded server allows."""
    return EtcdConfig(endpoints=endpoints, call_timeout_s=1.0, keepalive_s=1.0, keepalive_timeout_s=1.0)


def run_at_once(actions: list[Callable[[], None]]) -> None:
    """Run all in threads that begin together; join them."""
    begin = threading.Barrier(len(actions))

    def run(action: Callable[[], None]) -> None:
        begin.wait(EVENT_S)
        action()

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(EVENT_S)
    assert not any(thread.is_alive() for thread in threads)


def wait_until(check: Callable[[], bool]) -> None:
    """Wait for what has no event: a property that changes with the clock."""
    give_up_s = time.monotonic() + EVENT_S
    while not check():
        assert time.monotonic() < give_up_s, f"did not happen within {EVENT_S} s"
        threading.Event().wait(0.01)


def make_member(number: int) -> Member:
    return Member(
        id=f"h{number}-{number:06x}",
        host=f"h{number}",
        address="127.0.0.1",
        control_port=1000 + number,
        data_port=2000 + number,
        rendezvous_port=3000 + number,
        nproc=2,
        versions=(("torch", "2.13.0"),),
    )


def put_claim(registry: Registry, token: str = TOKEN) -> None:
    """The job is claimed, as it is before any member registers."""
    claim = JobClaim(run_id="", token=token, n_members=4, claimed_by="h0, process 1")
    registry.store.put(registry.job_key, msgspec.json.encode(claim))


def make_view(generation: int, slots: tuple[str, ...], *, phase: Phase = Phase.RUNNING) -> View:
    return View(generation=generation, phase=phase, slots=slots, nproc=2, reason="as the test wants it")


MEMBERS = tuple(make_member(number) for number in range(4))


def enrol(registry: Registry, number: int, ttl_s: float = 60.0) -> Lease:
    lease = registry.store.lease_grant(ttl_s)
    registry.register(MEMBERS[number], lease, TOKEN)
    return lease


def lead(registry: Registry, number: int, lease: Lease) -> int:
    term = registry.campaign(MEMBERS[number].id, lease)
    assert term is not None
    return term
