"""The incarnations of a host, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deadpool.config import Config, JobConfig, MembershipConfig
from deadpool.errors import ExitCode
from deadpool.membership.embedded import free_ports
from deadpool.runtime import agent as agent_module
from deadpool.runtime import agent_process
from deadpool.runtime.starting import Launch
from tests.unit.runtime.support import LOOPBACK


def test_a_host_that_is_cut_off_writes_one_file_of_events_however_often_it_tries_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent_module, "START_STORE_S", 0.05)
    monkeypatch.setattr(agent_process, "RETRY_S", 0.01)
    (port,) = free_ports(1)
    config = Config(job=JobConfig(job_id="job"), membership=MembershipConfig(etcd=(f"{LOOPBACK}:{port}",)))
    incarnations: list[agent_module.Agent] = []
    launch = Launch(run_id="run", token="token", is_return=True)

    code = agent_process._live(
        config, tmp_path, "h0", launch, incarnations, [], retry_until_s=time.monotonic() + 1.0
    )

    assert code == ExitCode.CONTROL_PLANE_UNREACHABLE
    assert capfd.readouterr().err.count("control plane unreachable") == 1
    (events,) = tmp_path.glob("events-*.jsonl")
    assert events.name == f"events-{incarnations[0].id}.jsonl"
