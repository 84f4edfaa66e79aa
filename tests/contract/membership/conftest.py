from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.registry import Registry
from deadpool.membership.store import MembershipStore
from tests.contract.membership.support import Backend, EtcdBackend, MemoryBackend, put_claim

_numbers = itertools.count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """A server that no test harms."""
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """A server that the test may stop and kill."""
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["memory", "etcd"])
def backend(request: pytest.FixtureRequest, etcd: EmbeddedEtcd) -> Iterator[Backend]:
    made = MemoryBackend() if request.param == "memory" else EtcdBackend(etcd)
    yield made
    made.close()


@pytest.fixture
def store(backend: Backend) -> MembershipStore:
    return backend.open_store()


@pytest.fixture
def prefix() -> str:
    """Keys of this test only: the etcd server is shared."""
    return f"/deadpool/test-{next(_numbers)}/"


@pytest.fixture
def unclaimed_registry(store: MembershipStore, prefix: str) -> Registry:
    return Registry(store, prefix.split("/")[2])


@pytest.fixture
def registry(unclaimed_registry: Registry) -> Registry:
    put_claim(unclaimed_registry)
    return unclaimed_registry
