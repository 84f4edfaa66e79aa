"""How this host reaches etcd, and the address at which other hosts reach this one."""

from __future__ import annotations

import socket
from pathlib import Path

from deadpool.config import MembershipConfig
from deadpool.membership.etcd import EtcdConfig, parse_endpoints


def etcd_config(config: MembershipConfig) -> EtcdConfig:
    """The client's configuration from ours."""
    return EtcdConfig(
        endpoints=parse_endpoints(",".join(config.etcd)),
        ca_file=Path(config.ca) if config.ca else None,
        cert_file=Path(config.cert) if config.cert else None,
        key_file=Path(config.key) if config.key else None,
        user=config.user or None,
        password=config.password or None,
    )


def own_address(config: MembershipConfig) -> str:
    """The address that this host uses towards etcd: peers reach it there too. Sends nothing."""
    host, _, port = etcd_config(config).endpoints[0].rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), int(port)))
        except OSError:
            return "127.0.0.1"  # no route: connecting to etcd says what is wrong
        address: str = probe.getsockname()[0]
        return address
