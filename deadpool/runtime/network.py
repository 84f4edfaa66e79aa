"""What can be seen of the network before a host joins: interface names, and addresses of loopback.

Gloo listens on the address that the host name resolves to, often loopback; its peers on other hosts are then
sent to their own. It takes an interface in GLOO_SOCKET_IFNAME instead, by its exact name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from deadpool.config import Config
from deadpool.runtime.endpoints import etcd_config, own_address

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def network_problems(environment: Mapping[str, str]) -> list[str]:
    """What cannot work, in sentences. Gloo ends the process over it, with less of an explanation."""
    value = environment.get(GLOO_VARIABLE)
    if value is None:
        return []
    known = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in value.split(",") if name not in known]
    if not unknown:
        return []
    return [
        f"{GLOO_VARIABLE}={value}: {', '.join(map(repr, unknown))} is no interface of this host "
        f"(it has {', '.join(known)}). Gloo wants exact names; prefixes and '^' are for NCCL_SOCKET_IFNAME"
    ]


def loopback_warnings(config: Config, environment: Mapping[str, str]) -> list[str]:
    """What works only while all hosts of the job share this machine, in sentences with the remedy."""
    address = config.run.address or own_address(config.membership)
    etcd = etcd_config(config.membership).endpoints[0].rpartition(":")[0].strip("[]")
    warnings = []
    if not config.run.address and (etcd == "localhost" or _is_loopback(etcd)):
        warnings.append(
            f"etcd is reached over loopback, so this host is known as {address}: "
            "if the job has hosts on other machines, give --address"
        )
    elif GLOO_VARIABLE not in environment and not _is_loopback(address) and _name_is_loopback():
        warnings.append(
            f"the host name {socket.gethostname()!r} resolves to loopback, and gloo listens there: set "
            f"{GLOO_VARIABLE} to the interface that has {address}"
        )
    return warnings


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name: whoever gave it knows what it is
        return False


def _name_is_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # gloo then falls back to loopback too, but says so itself
    return all(_is_loopback(str(entry[4][0])) for entry in found)
