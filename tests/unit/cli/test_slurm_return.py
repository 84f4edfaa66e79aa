"""A host under Slurm that is started again, by hand: after `readmit`, or because it was killed."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool.cli.readmit import readmit_host
from deadpool.cli.slurm import control_plane, ending, members
from deadpool.cli.slurm.ending import wait_for_hosts
from deadpool.cli.slurm.host import come_back, run_host
from deadpool.cli.slurm.job import EtcdNode, note_end, read_ends, read_grown, write_job
from deadpool.errors import ConfigError, ExitCode
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdStore
from deadpool.membership.records import Quarantine
from deadpool.membership.registry import Registry
from deadpool.report import AgentStatus
from deadpool.runtime.endpoints import etcd_config
from deadpool.runtime.result import note_agent
from tests.unit.cli.conftest import FakeAgent
from tests.unit.cli.slurm_jobs import away, fake, make_job

WAIT_S = 10.0


@pytest.fixture
def own_signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_readmit_under_slurm_says_how_a_host_is_started_there_again(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        job = make_job(away(etcd.endpoint))
        config = job.decode_config()
        write_job(tmp_path, job)
        with EtcdStore(etcd_config(config.membership)) as store:
            broken = Quarantine(host="n2", member="n2-bb", reason="broken")
            Registry(store, config.job.job_id).put_quarantine(broken)
        with pytest.raises(ConfigError, match="deadpool readmit n2 --job-id RUN"):
            readmit_host("n2", None, jobs_folder=tmp_path / "jobs")
        said, command = readmit_host("n2", str(tmp_path)).splitlines()
    assert "n2 is no longer quarantined in job slurm-7" in said
    words = shlex.split(command)
    assert words[:3] == ["nohup", "srun", "--jobid=7"]
    assert {"--overlap", "--nodelist=n2", "--open-mode=append"} <= set(words)
    assert f"deadpool slurm host {tmp_path} > /dev/null &" in command


def test_a_host_that_is_started_for_the_first_time_does_not_come_back(tmp_path: Path) -> None:
    note_agent(tmp_path, "n1-aa", "127.0.0.1", 1)
    assert not come_back(tmp_path, "n2")
    assert read_grown(tmp_path) == ()


def test_the_batch_script_waits_for_a_host_that_came_back_although_its_own_steps_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "UNREACHABLE_S", 0.0)
    monkeypatch.setattr(ending, "LOOK_S", 0.0)
    monkeypatch.setattr(ending, "POLL_S", 0.01)
    status = AgentStatus(member="n2-cc", host="n2", generation=1, phase="running")
    with FakeAgent("t", status) as agent:
        note_end(tmp_path, "n1", 0)
        note_end(tmp_path, "n2", int(ExitCode.REPLACED))
        assert come_back(tmp_path, "n2")
        note_agent(tmp_path, "n2-cc", "127.0.0.1", agent.port)
        has_ended = threading.Event()

        def wait() -> None:
            wait_for_hosts(tmp_path, make_job(away(), nodes=("n1", "n2")), [])
            has_ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not has_ended.wait(0.5)
        note_end(tmp_path, "n2", 0)
        assert has_ended.wait(WAIT_S)
        thread.join()


def test_a_member_of_etcd_that_is_lost_does_not_come_back_with_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    monkeypatch.setenv("DEADPOOL_ETCD_BIN", str(fake(tmp_path, "etcd", "exec sleep 1000")))
    monkeypatch.setattr(control_plane, "START_LIMIT_S", 0.0)
    member = EtcdNode(node="n1", address="127.0.0.1", client_port=1, peer_port=2)
    write_job(tmp_path, make_job(away(), nodes=("n1",), etcd=(member,)))
    note_agent(tmp_path, "n1-aa", "127.0.0.1", 1)  # it was killed: nothing says how it ended
    code = run_host(tmp_path, {**os.environ, "SLURMD_NODENAME": "n1"})
    assert code == ExitCode.CONTROL_PLANE_UNREACHABLE
    assert not (tmp_path / "calls").exists()  # of the program
    assert (read_ends(tmp_path), read_grown(tmp_path)) == ({"n1": code}, ("n1",))
