"""The embedded server: it comes up, comes back, says why it does not, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deadpool.errors import StoreUnavailable
from deadpool.liveness.stat import is_running
from deadpool.membership.embedded import EMBEDDED_WARNING, EmbeddedEtcd
from deadpool.membership.etcd import EtcdStore
from tests.contract.membership.support import etcd_config, wait_until


def test_it_serves_keeps_its_data_over_a_restart_and_is_gone_after_close(tmp_path: Path) -> None:
    threads_before = set(threading.enumerate())
    server = EmbeddedEtcd(tmp_path)
    server.start()
    endpoint, first_pid = server.endpoint, server.pid
    with EtcdStore(etcd_config(endpoint)) as store:
        store.put("/deadpool/a", b"1")
        assert store.server_version in EMBEDDED_WARNING
        assert "13766" in store.version_warning

        server.kill()
        assert not server.is_running()
        server.start()

        assert server.endpoint == endpoint
        assert server.pid != first_pid
        pair = store.get("/deadpool/a")
        assert pair is not None
        assert pair.value == b"1"
    server.close()
    server.close()
    assert not server.is_running()
    assert set(threading.enumerate()) <= threads_before


def test_it_can_be_closed_while_it_is_stopped(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)

    server.close()

    assert not server.is_running()


def test_it_dies_with_its_owner(tmp_path: Path) -> None:
    script = f"""
import signal, sys
from pathlib import Path
from deadpool.membership.embedded import EmbeddedEtcd
server = EmbeddedEtcd(Path({str(tmp_path)!r}))
server.start()
print(server.pid, flush=True)
signal.pause()
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as output:
        pid = int(output.readline())
    assert Path(f"/proc/{pid}").exists()

    owner.kill()
    owner.wait()

    wait_until(lambda: not is_running(pid))


def test_a_restart_on_a_port_that_was_taken_meanwhile_says_so(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path)
    server.start()
    host, _, port = server.endpoint.rpartition(":")
    server.kill()

    with socket.create_server((host, int(port))):
        with pytest.raises(StoreUnavailable, match="address already in use"):
            server.start()

    assert not server.is_running()
    server.close()


def test_data_that_cannot_be_used_are_told_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "etcd-data").write_text("not a folder")

    with pytest.raises(StoreUnavailable, match=r"etcd\.log"):
        EmbeddedEtcd(tmp_path).start()
