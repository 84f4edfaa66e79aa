"""Cut links and pulled cables between hosts that live: namespaces of one machine as hosts.

TCP says nothing of a cut: what was sent is lost without a word, and both ends wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool.testing.cluster import Event, RunFolder
from tests.namespaces import why_not
from tests.scenarios.netns import Network

TOY = Path(__file__).parent / "toy.py"
LIMIT_S = 200.0
SLOTS = 3
STEPS = ("--steps", "60", "--step-s", "0.1")
HOLD_STEP = 40  # training waits there until the host that was replaced is back

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

ETCD_ANSWERS = """
import sys, time, urllib.request
for _ in range(100):
    try:
        sys.exit(urllib.request.urlopen(f"http://{sys.argv[1]}/health", timeout=1).status != 200)
    except OSError:
        time.sleep(0.1)
sys.exit("etcd does not answer")
"""
ETCD_KEYS = """
import json, sys
from deadpool.membership.etcd import EtcdConfig, EtcdStore
with EtcdStore(EtcdConfig(endpoints=(sys.argv[1],))) as store:
    pairs, _ = store.get_prefix("/deadpool/")
print(json.dumps({pair.key: pair.value.decode(errors="replace") for pair in pairs}))
"""


class Cluster(RunFolder):
    """A job of three hosts and a spare, each in a namespace; host i has slot i."""

    def __init__(self, network: Network, folder: Path) -> None:
        super().__init__(folder / "run", LIMIT_S)
        self.network = network
        self.endpoint = network.start_etcd(folder)
        network.run_on_switch(sys.executable, "-c", ETCD_ANSWERS, self.endpoint)
        self.hosts: list[subprocess.Popen[bytes]] = []
        self._hold = folder / "holds" / f"step-{HOLD_STEP}"
        self._hold.parent.mkdir()
        self._hold.touch()
        self.args = (*STEPS, "--holds", str(self._hold.parent))

    def start(self, *options: str, **environment: str) -> None:
        for index in range(SLOTS + 1):
            command = [
                *("--etcd", self.endpoint, "--job-id", "cut", "--nnodes", str(SLOTS), "--spares", "1"),
                *("--lease-ttl-s", "3", "--progress-timeout-s", "3", "--run-dir", str(self.run_dir)),
                *("--record-dir", str(self.run_dir / "records"), "--node-rank", str(index)),
                *(*options, str(TOY), *self.args),
            ]
            output = self.run_dir / f"output-{index}.txt"
            self.hosts.append(self.network.start_host(index, command, output, **environment))

    def has_ended(self) -> bool:
        return bool(self.hosts) and all(host.poll() is not None for host in self.hosts)

    def wait_for_commit(self) -> None:
        self.wait_for(lambda e: e["event"] == "snapshot.committed" and e["step"] >= 5, "committed step")

    def codes(self) -> list[int | None]:
        """Exit codes of all hosts, once the job has ended."""
        self.wait_until(self.has_ended, "end of all hosts")
        return [host.returncode for host in self.hosts]

    def wait_for_return(self, *indices: int) -> Event:
        """Until a new incarnation of one of these hosts has registered; then training may end."""
        old = {self.member_of(index) for index in indices}
        labels = tuple(f"h{index}-" for index in indices)

        def is_return(event: Event) -> bool:
            member = event["member"]
            return event["event"] == "member.registered" and member.startswith(labels) and member not in old

        back = self.wait_for(is_return, "return of the replaced host")
        self._hold.unlink()
        return back

    def member_of(self, index: int) -> str:
        """Its first incarnation."""
        return str(next(e["member"] for e in self.events() if e["member"].startswith(f"h{index}-")))

    def keys(self) -> dict[str, str]:
        return dict(json.loads(self.network.run_on_switch(sys.executable, "-c", ETCD_KEYS, self.endpoint)))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Network(SLOTS + 1) as network:
        yield Cluster(network, tmp_path)


def check_replaced_once(rig: Any, cluster: Cluster, struck: set[int]) -> Event:
    """One host was replaced; the others went on in their processes, and no bit differs."""
    (done,) = cluster.named("recovery.done")
    rig.check_trace(cluster, cluster.args, world_size=SLOTS)
    rig.check_one_owner(cluster, world_size=SLOTS)
    pids = {rank: {w["pid"] for w in cluster.workers() if w["rank"] == rank} for rank in range(SLOTS)}
    changed = {rank for rank in pids if len(pids[rank]) > 1}
    assert len(changed) == 1
    assert changed <= struck
    return done


def test_of_two_hosts_whose_link_is_cut_one_is_replaced_and_the_other_keeps_its_process(
    rig: Any, cluster: Cluster
) -> None:
    """Both live, both reach etcd: nobody is dead, and no collective between them ever ends."""
    cluster.start()
    cluster.wait_for_commit()
    cluster.network.cut_link(1, 2)
    cut_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    done = cluster.wait_for(lambda event: event["event"] == "recovery.done", "recovery")
    assert done["monotonic_s"] - cut_s < 20.0
    cluster.wait_for_return(1, 2)
    assert cluster.codes() == [0, 0, 0, 0], cluster.output[-6000:]
    check_replaced_once(rig, cluster, struck={1, 2})
    begin = cluster.named("recovery.begin")[0]
    assert "no link between h1 and h2" in begin["reason"]


def test_a_cut_that_heartbeats_do_not_see_is_found_by_the_rebuild(rig: Any, cluster: Cluster) -> None:
    """Large jobs: not every two hosts exchange heartbeats. The failed rebuild names who was not reached."""
    cluster.start(
        *("--silence-dead-s", "90", "--collective-timeout-s", "6"),
        DEADPOOL_LIVENESS_SILENCE_SUSPECT_S="80",
        DEADPOOL_COMMUNICATOR_REBUILD_TIMEOUT_S="4",
        DEADPOOL_STORE_TRANSFER_TIMEOUT_S="2",
    )
    cluster.wait_for_commit()
    cluster.network.cut_link(1, 2)
    cluster.wait_for_return(1, 2)
    assert cluster.codes() == [0, 0, 0, 0], cluster.output[-6000:]
    check_replaced_once(rig, cluster, struck={1, 2})
    reasons = [event["reason"] for event in cluster.named("recovery.begin")]
    assert len(reasons) == 2
    assert "the same hosts try again" in reasons[0]
    assert "no link between h1 and h2" in reasons[1]


def test_a_host_that_is_cut_off_fences_itself_and_comes_back_as_a_spare(rig: Any, cluster: Cluster) -> None:
    cluster.start()
    cluster.wait_for_commit()
    old = cluster.member_of(2)
    cluster.network.cut_off(2)
    cluster.wait_for(lambda event: event["event"] == "recovery.done", "recovery")
    fenced = cluster.wait_for(
        lambda event: event["event"] == "member.fenced" and event["member"] == old, "self-fencing"
    )
    assert "its lease ran out" in fenced["reason"]
    before = cluster.keys()
    assert not [key for key in before if old in key and "/fenced/" not in key and "/0000000001/" not in key]
    cluster.network.heal(2)
    assert cluster.wait_for_return(2)["monotonic_s"] > fenced["monotonic_s"]
    assert cluster.codes() == [0, 0, 0, 0], cluster.output[-6000:]
    check_replaced_once(rig, cluster, struck={2})
    assert max(event["generation"] for event in cluster.events()) == 2
    assert not [e for e in cluster.events() if e["member"] == old and e["generation"] > 1]
