"""The other hosts as one sees them: who is gone, who is silent, and who hears of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deadpool.config import Config, LivenessConfig
from deadpool.core.types import Member, MemberId
from deadpool.events import EventLog
from deadpool.runtime import peers as peers_module
from deadpool.runtime.messages import Control, Heartbeat, Silent, StallQuery, StatusReply, StatusRequest
from deadpool.runtime.peers import Peers, PeersCallbacks
from tests.unit.runtime.planes import dial
from tests.unit.runtime.support import (
    LOOPBACK,
    TOKEN,
    WAIT_S,
    Loop,
    make_member,
    open_log,
    read_events,
    wait_until,
)

PATIENT = LivenessConfig(heartbeat_interval_s=0.02, silence_suspect_s=100.0, silence_dead_s=200.0)
QUICK = LivenessConfig(heartbeat_interval_s=0.02, silence_suspect_s=0.15, silence_dead_s=0.4)
PATIENT = LivenessConfig(heartbeat_interval_s=0.02, silence_suspect_s=0.5, silence_dead_s=2.0)
"""Where somebody must not be silent: threads of a busy machine may wait for a core."""
GENERATION = 3

LISTENER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


class Host:
    """One agent's view of its peers."""

    def __init__(self, id: MemberId, liveness: LivenessConfig, log: EventLog, loop: Loop) -> None:
        self.id = id
        self.messages: list[tuple[MemberId, Control]] = []
        self.observations: list[Silent] = []
        self.view_revision = 1
        self.reaches_store = True
        self.peers = Peers(
            id,
            LOOPBACK,
            TOKEN,
            Config(liveness=liveness),
            log,
            PeersCallbacks(
                post=loop.post,
                heartbeat=self._heartbeat,
                message=lambda sender, message: self.messages.append((sender, message)),
                silent=self.observations.append,
                status=lambda: b"fine",
            ),
        )
        self.member: Member = make_member(id, self.peers.listen())

    def observed(self, member: MemberId) -> list[Silent]:
        return [each for each in self.observations if member in (*each.silent, *each.gone)]

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            member=self.id,
            generation=GENERATION,
            view_revision=self.view_revision,
            reaches_store=self.reaches_store,
        )


MakeHosts = Callable[..., list[Host]]


def _watch(loop: Loop, host: Host, watchers: tuple[Host, ...]) -> None:
    """Let `watchers` watch; return once a heartbeat of each has reached `host`."""
    host.messages.clear()
    for watcher in watchers:
        watcher.view_revision += 1  # so that its heartbeats are told
        watcher.peers.start_watching()
    names = {watcher.id for watcher in watchers}
    loop.run_until(lambda: {sender for sender, _ in host.messages} >= names, "heartbeats")


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def loop() -> Loop:
    """All hosts share one main thread: the test's."""
    return Loop()


@pytest.fixture
def make_hosts(log_path: Path, loop: Loop) -> Iterator[MakeHosts]:
    """Hosts that know each other and any others given; none of them watches yet."""
    made: list[Host] = []
    log = open_log(log_path)

    def make(
        *ids: MemberId, liveness: LivenessConfig = PATIENT, others: tuple[Member, ...] = ()
    ) -> list[Host]:
        hosts = [Host(id, liveness, log, loop) for id in ids]
        made.extend(hosts)
        members = {member.id: member for member in (*(host.member for host in hosts), *others)}
        for host in hosts:
            host.peers.set_members(members)
        return hosts

    yield make
    for host in made:
        host.peers.close()
    log.close()


def _gone(observer: MemberId, member: MemberId) -> Silent:
    return Silent(observer=observer, generation=GENERATION, gone=(member,))


def test_a_host_that_listens_no_more_is_reported_gone_once_by_every_observer(
    make_hosts: MakeHosts, loop: Loop
) -> None:
    a, b, c = make_hosts("a", "b", "c")
    _watch(loop, b, (a, c))
    b.peers.close()
    expected = {_gone("a", "b"), _gone("c", "b")}
    loop.run_until(lambda: set(a.observed("b")) == set(c.observed("b")) == expected, "both observations")
    # Every further heartbeat is refused again; ten refusals later nothing was added.
    refused = loop.n_run + 10
    loop.run_until(lambda: loop.n_run >= refused, "more refusals")
    assert len(a.observed("b")) == len(c.observed("b")) == 2


def test_a_host_whose_process_is_killed_is_reported_gone_without_waiting_for_a_silence(
    make_hosts: MakeHosts, loop: Loop
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        member = make_member("b", int(process.stdout.readline()))
        (a,) = make_hosts("a", others=(member,))
        a.peers.start_watching()
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        loop.run_until(lambda: bool(a.observations), "the kill is seen")
    assert a.observations == [_gone("a", "b")]


def test_a_host_that_says_nothing_is_reported_silent_and_withdrawn_when_it_is_heard(
    make_hosts: MakeHosts, loop: Loop, log_path: Path
) -> None:
    a, b, c = make_hosts("a", "b", "c", liveness=QUICK)
    a.peers.start_watching()
    c.peers.start_watching()
    loop.run_until(lambda: any(each.observer == "a" for each in a.observed("b")), "the silence of b")
    assert "b" in a.peers.suspects
    b.peers.send("a", StallQuery(generation=1))
    loop.run_until(lambda: [e for e in a.observations if e.observer == "a"][-1].silent == (), "b is back")
    assert "b" not in a.peers.suspects
    loop.run_until(lambda: any(each.observer == "a" for each in c.observed("b")), "a told c")
    names = [event["event"] for event in read_events(log_path) if event.get("subject") == "b"]
    assert {"liveness.suspect", "liveness.silent", "liveness.returned"} <= set(names)


def test_a_host_that_is_heard_is_never_silent(make_hosts: MakeHosts, loop: Loop) -> None:
    a, b, _ = make_hosts("a", "b", "c", liveness=PATIENT)
    a.peers.start_watching()
    b.peers.start_watching()
    loop.run_until(lambda: bool(a.observed("c")), "the silence of c, which says nothing")
    assert a.observed("b") == []


def test_who_is_no_member_is_no_news(make_hosts: MakeHosts, loop: Loop) -> None:
    a, b, c = make_hosts("a", "b", "c")
    _watch(loop, c, (a,))
    a.peers.set_members({"a": a.member, "c": c.member})
    b.peers.close()
    c.peers.close()
    loop.run_until(lambda: bool(a.observed("c")), "c is gone")
    assert a.observed("b") == []


def test_after_the_end_of_the_job_hosts_that_leave_are_no_news(make_hosts: MakeHosts, loop: Loop) -> None:
    a, b = make_hosts("a", "b")
    _watch(loop, b, (a,))
    a.peers.stop_judging()
    b.peers.close()
    loop.run_posted()
    loop.run_until(lambda: a.peers.unheard() == {"b"}, "a knows, for it may have to save what b had")
    refused = loop.n_run + 3
    loop.run_until(lambda: loop.n_run >= refused, "refusals were looked into")
    assert a.observations == []


def test_observations_are_said_again_to_whoever_leads_next(make_hosts: MakeHosts, loop: Loop) -> None:
    a, b, c = make_hosts("a", "b", "c")
    _watch(loop, b, (a,))
    b.peers.close()
    loop.run_until(lambda: bool(a.observed("b")), "b is gone")
    loop.run_until(lambda: bool(c.observations), "c is told")
    c.observations.clear()
    a.peers.set_members({"a": a.member, "c": c.member})  # b led: its lease was ended at once
    a.peers.repeat_observations()
    loop.run_until(lambda: bool(c.observations), "c is told again")
    assert c.observations == [_gone("a", "b")]


def test_what_is_not_heard_is_said_again_to_the_leader_and_so_is_that_all_is_well(
    make_hosts: MakeHosts, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may be lost with its connection: nobody may depend on one that is sent once."""
    monkeypatch.setattr(peers_module, "REPEAT_S", 0.05)
    a, b, c, d = make_hosts("a", "b", "c", "d", liveness=PATIENT)
    for host in (a, c, d):
        host.peers.start_watching()

    def said_to(host: Host, silent: tuple[MemberId, ...], times: int) -> bool:
        a.peers.tick("c", ("a", "b", "c"))
        loop.run_posted()
        words = [each.silent for each in host.observations if each.observer == "a"]
        return words.count(silent) >= times

    wait_until(lambda: said_to(c, ("b",), 4), "c, who leads, hears of b again and again")
    heard_by_d = [each.silent for each in d.observations if each.observer == "a"]
    assert len(heard_by_d) <= 1  # who does not judge hears of a change only
    b.peers.start_watching()
    wait_until(lambda: said_to(c, (), peers_module.LAST_WORDS), "c hears that all is well")


def test_a_silent_leader_is_said_again_to_all(
    make_hosts: MakeHosts, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "REPEAT_S", 0.05)
    a, _, c = make_hosts("a", "b", "c", liveness=QUICK)
    for host in (a, c):
        host.peers.start_watching()

    def told() -> int:
        a.peers.tick("b", ("a", "b"))
        loop.run_posted()
        return sum(each.observer == "a" and each.silent == ("b",) for each in c.observations)

    wait_until(lambda: told() >= 4, "c hears of b, which leads, again and again")


def test_messages_run_on_the_main_thread_and_heartbeats_only_if_they_know_more(
    make_hosts: MakeHosts, loop: Loop
) -> None:
    a, b = make_hosts("a", "b")
    a.view_revision = 5
    b.view_revision = 5
    b.peers.start_watching()
    wait_until(lambda: a.peers.who_reaches_store()[0], "heartbeats of b")
    b.peers.send("a", StallQuery(generation=7))
    loop.run_until(lambda: bool(a.messages), "a message")
    assert a.messages == [("b", StallQuery(generation=7))]
    b.view_revision = 6
    loop.run_until(lambda: len(a.messages) > 1, "a heartbeat with a newer View")
    sender, message = a.messages[1]
    assert sender == "b"
    assert isinstance(message, Heartbeat)
    assert message.view_revision == 6


def test_heartbeats_say_who_reaches_the_control_plane(make_hosts: MakeHosts) -> None:
    a, b, c = make_hosts("a", "b", "c")
    assert a.peers.who_reaches_store() == (False, False)
    b.reaches_store = False
    b.peers.start_watching()
    wait_until(lambda: a.peers.who_reaches_store() == (True, False), "b, which is cut off")
    c.peers.start_watching()
    wait_until(lambda: a.peers.who_reaches_store() == (True, True), "c, which is not")


def test_a_peer_that_is_heard_counts_although_its_registration_has_gone(make_hosts: MakeHosts) -> None:
    """After an outage of etcd registrations go before they come again; that of a lost host may go last."""
    a, b, c = make_hosts("a", "b", "c", liveness=PATIENT)
    b.peers.start_watching()
    wait_until(lambda: a.peers.who_reaches_store() == (True, True), "heartbeats of b")
    a.peers.set_members({"a": a.member, "c": c.member})
    assert a.peers.who_reaches_store() == (True, True)
    b.peers.close()
    wait_until(lambda: a.peers.who_reaches_store() == (False, False), "b is heard no more")
    assert not a.peers.hears_none_of({"b", "c"})


def test_the_status_of_a_host_is_answered_on_its_control_port(make_hosts: MakeHosts) -> None:
    (a,) = make_hosts("a")
    with dial(a.member.control_port) as (_, channel):
        channel.send(StatusRequest(token=TOKEN))
        assert channel.receive() == StatusReply(body=b"fine")
