"""Servers that ask for a password or a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.errors import ConfigError, StoreUnavailable
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.membership.store import KeyPut, WatchConnected, WatchInterrupted
from tests.contract.membership.support import EtcdProcess, Recorder, add_users, etcd_config, tls_options

TLS = Path(__file__).parent / "tls"


def start_guarded(folder: Path) -> EtcdProcess:
    """A server with two users."""
    server = EtcdProcess.start_one(folder)
    add_users(server)
    return server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    server = start_guarded(tmp_path_factory.mktemp("guarded"))
    yield server
    server.close()


@pytest.fixture
def own_guarded(tmp_path: Path) -> Iterator[EtcdProcess]:
    server = start_guarded(tmp_path)
    yield server
    server.close()


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    server = EtcdProcess.start_one(
        tmp_path_factory.mktemp("tls"),
        *tls_options(TLS),
        config=EtcdConfig(
            endpoints=(),
            ca_file=TLS / "ca.crt",
            cert_file=TLS / "client.crt",
            key_file=TLS / "client.key",
        ),
    )
    yield server
    server.close()


def log_in(server: EtcdProcess, user: str = "trainer", password: str = "secret") -> EtcdStore:
    return EtcdStore(replace(server.config, user=user, password=password))


def test_a_user_works_without_tls_and_only_under_the_prefix(guarded: EtcdProcess) -> None:
    with log_in(guarded) as store:
        store.put("/deadpool/a", b"1")
        assert store.get("/deadpool/a") is not None
        with pytest.raises(StoreUnavailable, match="readwrite on the prefix /deadpool/"):
            store.put("/elsewhere", b"1")


def test_calls_and_watches_go_on_when_the_server_has_forgotten_their_token(own_guarded: EtcdProcess) -> None:
    with log_in(own_guarded) as watching, log_in(own_guarded) as writing:
        seen = Recorder()
        watching.watch(
            "/deadpool/watched/", seen
        )  # calls nothing meanwhile: only the watch meets the refusal
        seen.wait_for(WatchConnected)

        as_root = ("--user", "root:root-password")
        own_guarded.control(*as_root, "auth", "disable")  # forgets all tokens, as time does
        own_guarded.control("auth", "enable")
        own_guarded.kill()
        seen.wait_for(WatchInterrupted)
        own_guarded.start()
        writing.put("/deadpool/watched/a", b"2")

        seen.wait_for(KeyPut, lambda put: put.pair.key == "/deadpool/watched/a")


def test_a_wrong_password_and_a_missing_one_are_told_with_the_remedy(guarded: EtcdProcess) -> None:
    for store in (log_in(guarded, password="wrong"), EtcdStore(etcd_config(guarded.endpoint))):
        with pytest.raises(StoreUnavailable, match="Check user and password"):
            store.connect()
        store.close()


def test_client_certificates_work(tls_server: EtcdProcess) -> None:
    with EtcdStore(tls_server.config) as store:
        seen = Recorder()
        store.watch("/deadpool/", seen)
        seen.wait_for(WatchConnected)
        store.put("/deadpool/a", b"1")
        assert seen.wait_for(KeyPut).pair.value == b"1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"ca_file": TLS / "other-ca.crt"},
        {"cert_file": None, "key_file": None},
        {"ca_file": None, "cert_file": None, "key_file": None},
    ],
    ids=["another authority", "no own certificate", "no TLS"],
)
def test_what_the_server_does_not_trust_is_refused_in_time(
    tls_server: EtcdProcess, wrong: dict[str, Path | None]
) -> None:
    store = EtcdStore(replace(tls_server.config, call_timeout_s=0.7, **wrong))  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable, match="Check"):
        store.connect()
    store.close()


def test_all_problems_of_a_configuration_are_told_at_once(tmp_path: Path) -> None:
    store = EtcdStore(EtcdConfig(endpoints=(), user="somebody", cert_file=tmp_path / "missing.crt"))

    with pytest.raises(ConfigError) as error:
        store.connect()

    text = "\n".join(error.value.problems)
    for part in ("no etcd endpoint", "user and password", "certificate and key", "authority", "missing.crt"):
        assert part in text
