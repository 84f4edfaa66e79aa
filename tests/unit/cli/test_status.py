from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from deadpool.cli.jobs import JobFile, write_job_file
from deadpool.cli.readmit import readmit_host
from deadpool.cli.status import (
    StoreAnswer,
    assemble_status,
    describe_status,
    gather_status,
    status_command,
)
from deadpool.core.types import Member, Phase, View
from deadpool.errors import ConfigError
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.membership.records import JobClaim, Quarantine
from deadpool.membership.registry import Registry
from deadpool.report import AgentStatus, JobStatus, Protected, WorkerStatus
from tests.unit.cli.conftest import FakeAgent


def member(name: str, port: int = 1) -> Member:
    return Member(
        id=f"{name}-a",
        host=name,
        address="127.0.0.1",
        control_port=port,
        data_port=1,
        rendezvous_port=1,
        nproc=2,
    )


VIEW = View(
    generation=3, phase=Phase.RUNNING, slots=("h0-a", "h1-a"), nproc=2, reason="h9 was replaced by h1"
)


def agent(name: str, slot: int | None = None, step: int = 8, **more: object) -> AgentStatus:
    ranks = [None, None] if slot is None else [2 * slot, 2 * slot + 1]
    workers = tuple(
        WorkerStatus(rank=rank, pid=100 + number, state="running", finished_step=step)
        for number, rank in enumerate(ranks)
    )
    fields: dict[str, object] = {
        "member": f"{name}-a",
        "host": name,
        "generation": 3,
        "phase": "running",
        "reason": VIEW.reason,
        "slots": VIEW.slots,
        "nproc": 2,
        "granted_ttl_s": 10.0,
        "lease_left_s": 7.5,
        "workers": workers,
        **more,
    }
    return AgentStatus(**fields)  # type: ignore[arg-type]


def states(status: JobStatus) -> dict[str, str]:
    return {host.host: host.state for host in status.hosts}


def test_active_spare_suspect_dead_and_quarantined_hosts_are_told_apart() -> None:
    store = StoreAnswer(
        members=(member("h0"), member("h2"), member("h3"), member("h4"), member("h6")),
        view=VIEW,
        quarantined={"h4": "self-test failed", "h5": "pid not reaped"},
        recoveries=({"generation": 3, "subject": "h9-a", "host": "h9"},),
    )
    agents = [agent("h0", 0, suspects=("h3-a",)), agent("h2"), agent("h3"), agent("h4")]
    status = assemble_status("j", store, {each.member: each for each in agents}, is_reachable=True)
    assert states(status) == {
        "h0": "active",
        "h1": "dead",  # in the View, but its lease has ended
        "h2": "spare",
        "h3": "suspect",  # a neighbour does not hear it
        "h4": "quarantined",
        "h5": "quarantined",
        "h6": "suspect",  # it does not answer
        "h9": "dead",
    }
    assert next(host.slot for host in status.hosts if host.member == "h1-a") == 1


@pytest.mark.parametrize(
    "known",
    [{"replaced": ("h9-a",)}, {"generation": 2, "slots": ("h9-a", "h1-a")}],
    ids=["agents obey the new View", "an agent is a View behind"],
)
def test_a_replaced_host_is_dead_before_the_recovery_is_summed_up(known: dict[str, object]) -> None:
    agents = {"h0-a": agent("h0", 0), "h1-a": msgspec.structs.replace(agent("h1", 1), **known)}
    store = StoreAnswer(members=(member("h0"), member("h1")), view=VIEW)
    status = assemble_status("j", store, agents, is_reachable=True)
    assert states(status) == {"h0": "active", "h1": "active", "h9": "dead"}


def test_the_rank_table_says_who_holds_a_rank() -> None:
    agents = {"h0-a": agent("h0", 0, step=8), "h1-a": agent("h1", 1, step=7)}
    store = StoreAnswer(members=(member("h0"), member("h1")), view=VIEW)
    status = assemble_status("j", store, agents, is_reachable=True)
    assert [(rank.rank, rank.slot, rank.host, rank.pid, rank.finished_step) for rank in status.ranks] == [
        (0, 0, "h0", 100, 8),
        (1, 0, "h0", 101, 8),
        (2, 1, "h1", 100, 7),
        (3, 1, "h1", 101, 7),
    ]
    assert status.world_size == 4
    assert [host.ranks for host in status.hosts] == [(0, 1), (2, 3)]


def test_a_vacant_slot_and_a_silent_host_are_shown_as_such() -> None:
    view = View(
        generation=4, phase=Phase.STALLED, slots=("h0-a", ""), nproc=1, reason="slot 1 waits for a spare"
    )
    status = assemble_status("j", StoreAnswer(members=(member("h0"),), view=view), {}, is_reachable=True)
    assert [(rank.rank, rank.state) for rank in status.ranks] == [(0, "unknown"), (1, "vacant")]
    assert status.phase == "stalled"


def test_protection_is_the_newest_one_known_and_steps_beyond_it_are_at_risk() -> None:
    agents = {
        "h0-a": agent("h0", 0, step=9, protected=Protected(step=6, generation=3, age_s=0.5)),
        "h1-a": agent(
            "h1", 1, step=9, protected=Protected(step=7, generation=3, age_s=0.1), degraded=("slow",)
        ),
    }
    store = StoreAnswer(members=(member("h0"), member("h1")), view=VIEW)
    status = assemble_status("j", store, agents, is_reachable=True)
    assert status.protected == Protected(step=7, generation=3, age_s=0.1)
    assert status.steps_at_risk == 2
    lines = describe_status(status)
    text = "protected up to step 7 (0.1 s ago); 2 finished steps are not"
    assert f"{text}; the loss of any one host is survivable" in lines
    assert "degraded: slow" in lines
    assert "lease: 10 s granted" in lines


def test_without_protection_the_text_says_so() -> None:
    status = assemble_status("j", StoreAnswer(view=VIEW), {}, is_reachable=True)
    assert any(line.startswith("not protected") for line in describe_status(status))


def test_with_the_control_plane_away_the_agents_tell_the_view_and_nobody_is_dead() -> None:
    agents = {"h0-a": agent("h0", 0)}
    status = assemble_status("j", StoreAnswer(), agents, is_reachable=False)
    assert (status.control_plane, status.generation, status.world_size) == ("unreachable", 3, 4)
    assert {host.member: host.state for host in status.hosts} == {"h0-a": "active", "h1-a": "suspect"}


# ---- with real sockets and a real etcd ---------------------------------------------------------------


@pytest.fixture
def fake_agent() -> Iterator[FakeAgent]:
    with FakeAgent("secret", agent("h0", 0)) as served:
        yield served


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server.endpoint


@pytest.fixture
def make_job(etcd: str) -> Iterator[Callable[..., JobFile]]:
    store = EtcdStore(EtcdConfig(endpoints=(etcd,)))
    store.connect()

    def make(job_id: str, *members: Member, token: str = "secret") -> JobFile:
        registry = Registry(store, job_id)
        lease = store.lease_grant(30)
        claim = JobClaim(run_id="r", token=token, n_members=2, claimed_by="test")
        store.put(registry.job_key, msgspec.json.encode(claim))
        store.put(registry.view_key, msgspec.json.encode(VIEW))
        for each in members:
            registry.register(each, lease, token)
        registry.put_quarantine(Quarantine(host="h7", member="h7-a", reason="broken"))
        return JobFile(job_id=job_id, token="", run_dir="/x", pid=0, etcd=(etcd,))

    yield make
    store.close()


def test_agents_found_in_etcd_are_asked_with_the_token_of_the_job(
    make_job: Callable[..., JobFile], fake_agent: FakeAgent
) -> None:
    job = make_job("found", member("h0", fake_agent.port))
    status, problem = gather_status(job)
    assert problem == ""
    assert (status.control_plane, status.generation) == ("reachable", 3)
    assert states(status) == {"h0": "active", "h1": "dead", "h7": "quarantined"}
    assert status.ranks[0].pid == 100


def test_an_agent_that_does_not_answer_delays_the_status_only_to_the_deadline(
    make_job: Callable[..., JobFile], fake_agent: FakeAgent, deaf_port: int
) -> None:
    job = make_job("deaf", member("h0", fake_agent.port), member("h1", deaf_port))
    began_s = time.monotonic()
    status, _ = gather_status(job)
    assert time.monotonic() - began_s < 3.0
    assert states(status) == {"h0": "active", "h1": "suspect", "h7": "quarantined"}


def test_a_quarantined_host_is_readmitted_once(make_job: Callable[..., JobFile], etcd: str) -> None:
    make_job("mended")
    assert "h7 is no longer quarantined" in readmit_host("h7", "mended", etcd)
    with pytest.raises(ConfigError, match=r"'h7' is not quarantined in job mended \(quarantined: none\)"):
        readmit_host("h7", "mended", etcd)


def test_a_wrong_token_gets_no_answer(make_job: Callable[..., JobFile], fake_agent: FakeAgent) -> None:
    job = make_job("token", member("h0", fake_agent.port), token="guess")
    assert states(gather_status(job)[0])["h0"] == "suspect"


def test_a_job_that_etcd_does_not_know_is_bad_input(etcd: str) -> None:
    with pytest.raises(ConfigError, match="no job 'nowhere'"):
        gather_status(JobFile(job_id="nowhere", token="", run_dir="", pid=0, etcd=(etcd,)))


def test_json_follows_the_schema(
    make_job: Callable[..., JobFile], etcd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job("json")
    assert status_command("json", as_json=True, etcd=etcd) == 0
    status = msgspec.json.decode(capsys.readouterr().out, type=JobStatus)
    assert (status.job_id, status.schema) == ("json", 1)


def test_with_etcd_down_the_agents_are_shown_and_the_code_is_5(
    tmp_path: Path, fake_agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobFile(
        job_id="j",
        token="secret",
        run_dir="/x",
        pid=os.getpid(),
        etcd=("127.0.0.1:1",),
        members_hint=(f"127.0.0.1:{fake_agent.port}",),
    )
    write_job_file(job, tmp_path)
    began_s = time.monotonic()
    assert status_command("j", jobs_folder=tmp_path) == 5
    assert time.monotonic() - began_s < 3.0
    output = capsys.readouterr()
    assert "control plane unreachable" in output.err
    assert "h0           active" in output.out
    assert status_command("j", as_json=True, jobs_folder=tmp_path) == 5
    assert json.loads(capsys.readouterr().out)["control_plane"] == "unreachable"


def test_a_frozen_etcd_and_a_stopped_agent_together_are_answered_within_three_seconds(
    tmp_path: Path, deaf_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedEtcd(tmp_path / "etcd") as server:
        job = JobFile(
            job_id="j",
            token="t",
            run_dir="/x",
            pid=os.getpid(),
            etcd=(server.endpoint,),
            members_hint=(f"127.0.0.1:{deaf_port}",),
        )
        write_job_file(job, tmp_path / "jobs")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            code = status_command("j", jobs_folder=tmp_path / "jobs")
            took_s = time.monotonic() - began_s
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert code == 5
    assert "control plane unreachable" in capsys.readouterr().err
    assert took_s < 3.0
