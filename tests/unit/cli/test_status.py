from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deadpool.cli.job_status import StoreAnswer, assemble_status
from deadpool.cli.jobs import JobFile, write_job_file
from deadpool.cli.readmit import readmit_host
from deadpool.cli.status import gather_status, status_command
from deadpool.cli.status_text import describe_status
from deadpool.core.types import Member, Phase, View
from deadpool.errors import ConfigError
from deadpool.membership.embedded import EmbeddedEtcd
from deadpool.membership.etcd import EtcdConfig, EtcdStore
from deadpool.membership.records import JobClaim, Quarantine
from deadpool.membership.registry import Registry
from deadpool.report import AgentStatus, JobStatus, Protected, WorkerStatus
from deadpool.runtime.result import note_agent, note_result
from tests.unit.cli.conftest import FakeAgent

ANSWER_S = 3.0 + 3.0  # the second half is for a machine that does other things, too


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


def assembled(store: StoreAnswer, *agents: AgentStatus, is_reachable: bool = True) -> JobStatus:
    """The picture if everybody was asked whom somebody knows."""
    named = {each.id for each in store.members} | {slot for each in agents for slot in each.slots}
    answers = {each.member: each for each in agents}
    return assemble_status("j", store, answers, is_reachable=is_reachable, asked=named | answers.keys())


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
    status = assembled(store, *agents)
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
    status = assembled(store, *agents.values())
    assert states(status) == {"h0": "active", "h1": "active", "h9": "dead"}


def test_the_rank_table_says_who_holds_a_rank() -> None:
    agents = {"h0-a": agent("h0", 0, step=8), "h1-a": agent("h1", 1, step=7)}
    store = StoreAnswer(members=(member("h0"), member("h1")), view=VIEW)
    status = assembled(store, *agents.values())
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
    status = assembled(StoreAnswer(members=(member("h0"),), view=view))
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
    status = assembled(store, *agents.values())
    assert status.protected == Protected(step=7, generation=3, age_s=0.1)
    assert status.steps_at_risk == 2
    lines = describe_status(status)
    text = "protected up to step 7 (0.1 s ago); 2 finished steps are not"
    assert f"{text}; the loss of any one host is survivable" in lines
    assert "degraded: slow" in lines
    assert "lease: 10 s granted" in lines


def test_a_host_that_is_lost_by_now_counts_against_what_is_survivable() -> None:
    safe = Protected(step=7, generation=3, age_s=4.0)
    h0 = agent("h0", 0, protected=safe, suspects=("h1-a",))
    away = assembled(StoreAnswer(), h0, is_reachable=False)
    assert (away.survivable_host_losses, away.protected) == (0, safe)
    assert any("no further loss is survivable" in line for line in describe_status(away))
    ended = assembled(StoreAnswer(members=(member("h0"),), view=VIEW), h0)
    assert ended.survivable_host_losses == 0
    silent = assembled(StoreAnswer(members=(member("h0"), member("h1")), view=VIEW), h0)
    assert silent.survivable_host_losses == 0


def test_what_an_agent_of_an_older_generation_says_of_copies_does_not_count() -> None:
    view = replace(VIEW, generation=4, phase=Phase.ABORTING)
    stale = agent("h0", 0, protected=Protected(step=7, generation=3, age_s=4.0), degraded=("full",))
    store = StoreAnswer(members=(member("h0"), member("h1")), view=view)
    status = assembled(store, stale, agent("h1", 1, generation=4))
    assert (status.protected, status.survivable_host_losses, status.degraded) == (None, 0, ())


def test_hosts_that_move_take_over_or_lack_etcd_are_noted() -> None:
    view = replace(VIEW, generation=4, phase=Phase.RESTORING, joining=("h1-a",), leaving=("h9-a",))
    store = StoreAnswer(members=(member("h0"), member("h1"), member("h9")), view=view)
    agents = (agent("h0", 0, reaches_store=False), agent("h1", 1), agent("h9"))
    status = assembled(store, *agents)
    assert [(host.host, host.state, host.note) for host in status.hosts] == [
        ("h0", "active", "does not reach etcd"),
        ("h1", "active", "takes the slot over"),
        ("h9", "suspect", "its slot has moved: it is only read from"),
    ]


def test_a_host_that_could_not_be_asked_in_time_is_no_suspect() -> None:
    store = StoreAnswer(members=(member("h0"), member("h1")), view=VIEW)
    status = assemble_status("j", store, {}, is_reachable=True, asked=("h1-a",))
    assert [(host.state, host.note) for host in status.hosts] == [
        ("active", "could not be asked"),
        ("suspect", "does not answer"),
    ]


def test_the_leader_and_the_hosts_for_which_it_waits_are_named() -> None:
    late = tuple(f"n{number}" for number in range(11))
    h1 = agent("h1", 1, leader="h1-a", waits_for=late)
    status = assembled(StoreAnswer(members=(member("h0"), member("h1")), view=VIEW), agent("h0", 0), h1)
    lines = describe_status(status)
    assert (status.leader, status.waits_for) == ("h1", late)
    assert "  waits for n0, n1, n2, n3, n4, n5, n6, n7 and 3 more" in lines
    assert "hosts: 2 active; h1 leads" in lines


def test_of_a_large_job_the_text_shows_what_is_unusual() -> None:
    count = 1250
    view = View(
        generation=3, phase=Phase.RUNNING, slots=tuple(f"n{i}-a" for i in range(count)), nproc=8, reason=""
    )
    silent = "n700-a"
    members = tuple(replace(member(f"n{i}"), nproc=8) for i in range(count + 2))
    agents = {
        each.id: AgentStatus(
            member=each.id,
            host=each.host,
            generation=3,
            phase="running",
            slots=view.slots,
            nproc=8,
            workers=tuple(
                WorkerStatus(rank=8 * i + local, pid=1, state="running", finished_step=5)
                for local in range(8 if i < count else 0)
            ),
            degraded=(f"rank {8 * i} is slow",),
        )
        for i, each in enumerate(members)
        if each.id != silent
    }
    store = StoreAnswer(members=members, view=view)
    status = assemble_status("j", store, agents, is_reachable=True, asked={each.id for each in members})
    lines = describe_status(status)
    assert len(lines) < 40
    assert "hosts: 1249 active, 1 suspect, 2 spare" in lines
    assert sum("n700" in line for line in lines) == 1 + 8
    assert "degraded: and 1243 more (--all shows them)" in lines
    assert len(describe_status(status, show_all=True)) > count * 9


def test_without_protection_the_text_says_so() -> None:
    status = assembled(StoreAnswer(view=VIEW))
    assert any(line.startswith("not protected") for line in describe_status(status))


def test_with_the_control_plane_away_the_agents_tell_the_view_and_nobody_is_dead() -> None:
    agents = {"h0-a": agent("h0", 0)}
    status = assembled(StoreAnswer(), *agents.values(), is_reachable=False)
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
    assert time.monotonic() - began_s < ANSWER_S
    assert states(status) == {"h0": "active", "h1": "suspect", "h7": "quarantined"}


def test_a_quarantined_host_is_readmitted_once(make_job: Callable[..., JobFile], etcd: str) -> None:
    make_job("mended")
    assert "h7 is no longer quarantined" in readmit_host("h7", "mended", etcd)
    with pytest.raises(ConfigError, match=r"'h7' is not quarantined in job mended \(quarantined: none\)"):
        readmit_host("h7", "mended", etcd)


def test_a_job_that_has_ended_is_told_by_its_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_agent(tmp_path, "h0-a", "127.0.0.1", 1)
    note_result(tmp_path, 3, "no spare is left")
    job = JobFile(job_id="over", token="t", run_dir=str(tmp_path), pid=0, etcd=("127.0.0.1:1",))
    write_job_file(job, tmp_path / "jobs")
    assert status_command("over", jobs_folder=tmp_path / "jobs") == 0
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "job over: ended",
        "  no spare is left",
        "  it has ended with code 3",
    ]
    assert output.err == ""


def test_how_an_earlier_job_of_the_folder_ended_is_not_told_of_one_that_runs(tmp_path: Path) -> None:
    note_result(tmp_path, 3, "no spare is left")
    job = JobFile(job_id="j", token="t", run_dir=str(tmp_path), pid=os.getpid(), etcd=("127.0.0.1:1",))
    status, problem = gather_status(job)
    assert problem
    assert (status.control_plane, status.exit_code) == ("unreachable", None)


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
        run_dir=str(tmp_path),
        pid=os.getpid(),
        etcd=("127.0.0.1:1",),
    )
    note_agent(tmp_path, "h0-a", "127.0.0.1", fake_agent.port)
    write_job_file(job, tmp_path)
    began_s = time.monotonic()
    assert status_command("j", jobs_folder=tmp_path) == 5
    assert time.monotonic() - began_s < ANSWER_S
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
            run_dir=str(tmp_path),
            pid=os.getpid(),
            etcd=(server.endpoint,),
        )
        note_agent(tmp_path, "h0-a", "127.0.0.1", deaf_port)
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
    assert took_s < ANSWER_S
