"""What can be seen of the network before a host joins."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from deadpool.config import Config, MembershipConfig, RunConfig
from deadpool.runtime.network import loopback_warnings, network_problems


def config(etcd: str, address: str = "") -> Config:
    return Config(membership=MembershipConfig(etcd=(etcd,)), run=RunConfig(address=address))


@pytest.mark.parametrize("value", ["lo", "lo,lo"])
def test_interfaces_that_exist_are_accepted(value: str) -> None:
    assert network_problems({"GLOO_SOCKET_IFNAME": value}) == []
    assert network_problems({}) == []


@pytest.mark.parametrize("value", ["^lo", "=lo", "eth-that-is-not-here", "lo,", ""])
def test_what_gloo_would_die_of_is_refused_with_the_names_that_there_are(value: str) -> None:
    (problem,) = network_problems({"GLOO_SOCKET_IFNAME": value})
    assert f"GLOO_SOCKET_IFNAME={value}: " in problem
    assert "it has " in problem
    assert "lo" in problem.split("it has ")[1]


def test_a_host_that_is_known_by_a_loopback_address_is_told_to_give_another() -> None:
    (warning,) = loopback_warnings(config("127.0.0.1:2379"), {})
    assert "known as 127.0.0.1" in warning
    assert "--address" in warning
    assert loopback_warnings(config("127.0.0.1:2379", address="127.0.0.1"), {}) == []  # it knows


def test_an_etcd_whose_name_is_unknown_is_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert not any("known as" in line for line in loopback_warnings(config("no-such-host.invalid:2379"), {}))


def name_resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Only the resolver of this machine is replaced: which names it knows is no property of the code."""

    def getaddrinfo(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_host_name_that_resolves_to_loopback_names_the_variable_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = config("etcd1:2379", address="192.0.2.7")
    name_resolves_to(monkeypatch, "127.0.1.1")
    (warning,) = loopback_warnings(far, {})
    assert "set GLOO_SOCKET_IFNAME to the interface that has 192.0.2.7" in warning
    assert loopback_warnings(far, {"GLOO_SOCKET_IFNAME": "eth0"}) == []
    name_resolves_to(monkeypatch, "127.0.1.1", "192.0.2.7")
    assert loopback_warnings(far, {}) == []
