"""Who waits for whom under Slurm, and who ends the job when its batch host is dead."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deadpool.cli.slurm import batch_host, ending, members
from deadpool.cli.slurm.batch_host import end_without_batch_host, is_down
from deadpool.cli.slurm.ending import wait_for_hosts
from deadpool.cli.slurm.job import (
    note_end,
    note_grown,
)
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.report import AgentStatus
from deadpool.runtime.result import note_agent, read_result
from tests.unit.cli.conftest import FakeAgent
from tests.unit.cli.slurm_jobs import FINISHED, away, fake, make_job, write_result


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        yield etcd


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    with FakeAgent("t", AgentStatus(member="n2-bb", host="n2", generation=1, phase="running")) as served:
        yield served


def test_a_silent_etcd_ends_no_job_whose_agents_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: FakeAgent
) -> None:
    monkeypatch.setattr(members, "UNREACHABLE_S", 0.0)
    note_end(tmp_path, "n1", 143)  # one host was told to end, and the others go on
    left = members.Members(tmp_path, make_job(away()))
    note_agent(tmp_path, "n1-aa", "127.0.0.1", 1)
    note_agent(tmp_path, "n2-bb", "127.0.0.1", agent.port)
    left.ask()
    assert not left.have_ended()
    note_end(tmp_path, "n2", 0)
    assert left.have_ended()


def test_an_agent_that_is_not_registered_and_answers_has_not_ended(
    tmp_path: Path, etcd: EmbeddedEtcd, agent: FakeAgent
) -> None:
    left = members.Members(tmp_path, make_job(away(etcd.endpoint)))
    note_agent(tmp_path, "n2-bb", "127.0.0.1", agent.port)
    left.ask()
    assert left.are_missing
    assert not left.have_ended()


def test_an_agent_that_accepts_connections_and_says_nothing_has_ended(
    tmp_path: Path, etcd: EmbeddedEtcd, deaf_port: int
) -> None:
    left = members.Members(tmp_path, make_job(away(etcd.endpoint)))
    note_agent(tmp_path, "n2-bb", "127.0.0.1", deaf_port)
    left.ask()
    assert left.have_ended()


def test_a_short_silence_of_etcd_is_no_end(tmp_path: Path) -> None:
    left = members.Members(tmp_path, make_job(away()))
    left.ask()
    assert not left.have_ended()
    assert left.missing_s == 0.0


def test_hosts_that_run_on_and_do_not_register_are_given_up(
    tmp_path: Path, etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "DESERTED_S", 0.5)
    monkeypatch.setattr(ending, "LOOK_S", 0.1)
    began_s = time.monotonic()
    wait_for_hosts(tmp_path, make_job(away(etcd.endpoint)), [os.getpid()])
    assert time.monotonic() - began_s >= 0.5


def test_the_wait_is_over_when_every_node_has_ended_those_that_joined_later_included(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_grown(tmp_path, "n5")
    job = make_job(away(), nodes=("n1", "n2"))
    for node in ("n1", "n2"):
        note_end(tmp_path, node, 1)
    thread = threading.Thread(target=wait_for_hosts, args=(tmp_path, job, []))
    thread.start()
    note_end(tmp_path, "n5", 1)
    thread.join(20.0)
    assert not thread.is_alive()
    assert "looking again" not in capsys.readouterr().err


def test_a_shared_folder_that_is_away_for_a_while_ends_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grown").mkdir()  # cannot be read
    note_end(tmp_path, "n1", 0)
    said = []

    def wait() -> None:
        wait_for_hosts(tmp_path, make_job(away()), [])
        said.append(capsys.readouterr().err)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline_s = time.monotonic() + 20.0
    while "looking again" not in "".join(said):
        said.append(capsys.readouterr().err)
        assert thread.is_alive()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    (tmp_path / "grown").rmdir()
    thread.join(20.0)
    assert not thread.is_alive()
    assert "".join(said).count("looking again") == 1


# ---- the batch host is dead ------------------------------------------------------------------------------


@pytest.fixture
def without_batch_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Lets a host of n2 end while n1, the batch host, accepts no connections; returns the calls."""
    monkeypatch.setattr(batch_host, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(batch_host, "DIAL_S", 0.0)
    monkeypatch.setattr(batch_host, "GIVE_UP_S", 1.0)
    monkeypatch.setattr(members, "UNREACHABLE_S", 0.0)

    def end(states: dict[str, str], left: str = "n1 n2") -> list[str]:
        lines = [f"*{node}*) echo NodeName={node} State={state};;" for node, state in states.items()]
        both = "; ".join(f"echo NodeName={node} State={state}" for node, state in states.items())
        lines += [f"*hostnames*) echo {left};;", "*job*) echo JobId=7 NodeList=n;;"]
        fake(tmp_path, "scontrol", 'case "$*" in', f"*n1,n2*) {both};;", *lines, "esac")
        fake(tmp_path, "scancel")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        config = away()
        address = ("127.0.0.1", int(config.membership.etcd[0].rpartition(":")[2]))
        job = make_job(config, nodes=("n1", "n2"), batch_address=address)
        end_without_batch_host(tmp_path, job, "n2", 0, threading.Event())
        return [call for call in (tmp_path / "calls").read_text().splitlines() if "scancel" in call]

    return end


def test_a_finished_job_whose_batch_host_is_dead_is_cancelled(
    tmp_path: Path, without_batch_host: Callable[..., list[str]]
) -> None:
    write_result(tmp_path, **FINISHED)
    assert without_batch_host({"n1": "DOWN*", "n2": "ALLOCATED"}) == ["scancel 7"]
    assert read_result(tmp_path).phase == "finished"


def test_a_finished_job_whose_batch_host_was_lost_and_came_back_is_cancelled(
    tmp_path: Path, without_batch_host: Callable[..., list[str]]
) -> None:
    write_result(tmp_path, **FINISHED)
    assert without_batch_host({"n1": "IDLE", "n2": "ALLOCATED"}, left="n2") == ["scancel 7"]


def test_a_host_that_is_cut_off_itself_does_not_cancel_the_job(
    tmp_path: Path, without_batch_host: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    note_end(tmp_path, "n2", 5)
    assert without_batch_host({"n1": "ALLOCATED", "n2": "ALLOCATED"}) == []
    assert "Slurm does not say that batch host n1 is dead" in capsys.readouterr().err


def test_a_job_whose_batch_host_is_dead_and_that_trains_on_is_not_cancelled(
    without_batch_host: Callable[..., list[str]],
) -> None:
    assert without_batch_host({"n1": "DOWN*", "n2": "ALLOCATED"}) == []  # the host of n2 has no end


def test_a_job_without_a_result_is_cancelled_when_every_node_has_ended_or_is_dead(
    tmp_path: Path, without_batch_host: Callable[..., list[str]]
) -> None:
    note_end(tmp_path, "n2", 5)
    assert without_batch_host({"n1": "DOWN*", "n2": "ALLOCATED"}) == ["scancel 7"]
    assert read_result(tmp_path).exit_code == 5


@pytest.mark.parametrize(
    ("state", "is_dead"),
    [
        ("ALLOCATED", False),
        ("MIXED+PLANNED", False),
        ("ALLOCATED*", True),
        ("DOWN*+DRAIN", True),
        ("MIXED+NOT_RESPONDING", True),
    ],
)
def test_a_node_is_dead_when_slurm_does_not_hear_it(state: str, is_dead: bool) -> None:
    assert is_down({"State": state}) is is_dead
