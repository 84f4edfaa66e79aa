from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deadpool.errors import ConfigError
from deadpool.events import boottime_s
from deadpool.liveness.stat import state_of
from deadpool.testing.faults import (
    Injection,
    InjectionKind,
    InjectionPlan,
    Point,
    carry_out,
    descendants,
    parse_injection,
    parse_injections,
)


def test_a_spec_names_kind_rank_step_and_point() -> None:
    spec = "sigkill:rank=1@step=7,at=collective=3"
    assert parse_injection(spec, 2) == Injection(
        kind=InjectionKind.SIGKILL,
        rank=1,
        step=7,
        point=Point.COLLECTIVE,
        collective=3,
        index=2,
        spec=spec,
    )


def test_every_kind_can_strike_at_every_point() -> None:
    for kind in InjectionKind:
        for point in Point:
            injection = parse_injection(f"{kind.value}:rank=0@step=1,at={point.value}")
            assert (injection.kind, injection.point, injection.collective) == (kind, point, 1)


def test_without_a_point_faults_strike_the_first_collective_and_bits_flip_after_the_optimizer() -> None:
    assert parse_injection("host-stop:rank=0@step=15").point is Point.COLLECTIVE
    assert parse_injection("bitflip:rank=0@step=15").point is Point.AFTER_OPTIMIZER


@pytest.mark.parametrize(
    ("spec", "problems"),
    [
        ("sigkil:rank=0@step=1", ["unknown kind 'sigkil'; did you mean 'sigkill'?"]),
        ("oom:rank=0@step=1", ["unknown kind 'oom' (kinds: sigkill"]),
        ("sigkill", ["give the rank", "give the step"]),
        ("sigkill:rank=-1@step=0", ["give the rank", "give the step"]),
        ("sigkill:step=1@rank=1", ["give the rank", "give the step"]),
        ("sigkill:rank=1@step=²", ["give the step"]),
        ("sigkill:rank=1@step=1,at=forward", ["unknown point 'forward'; did you mean 'before-forward'?"]),
        ("sigkill:rank=1@step=1,at=collective=0", ["counts from 1"]),
        ("sigkill:rank=1@step=1,at=capture=2", ["takes no number"]),
        ("sigkill:rank=1@step=1,collective=2", ["'collective=2' is not at=POINT"]),
        ("sigkill:rank=1@step=1,", ["is not at=POINT"]),
        ("kill:rank=x@step=y,at=z", ["unknown kind", "give the rank", "give the step", "unknown point"]),
    ],
)
def test_a_bad_spec_is_refused_with_all_its_problems(spec: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_injection(spec)
    assert len(caught.value.problems) == len(problems)
    for expected, problem in zip(problems, caught.value.problems, strict=True):
        assert problem.startswith(f"--inject {spec}: ")
        assert expected in problem


def test_all_specs_of_a_run_are_read_together_and_ranks_must_exist() -> None:
    assert [item.index for item in parse_injections(["sigkill:rank=0@step=1", "exit:rank=1@step=2"], 2)] == [
        0,
        1,
    ]
    with pytest.raises(ConfigError) as caught:
        parse_injections(["sigkill:rank=2@step=1", "nonsense"], 2)
    assert "ranks are 0 to 1 in a world of 2" in caught.value.problems[0]
    assert len(caught.value.problems) == 4


def make_plan(tmp_path: Path, rank: int, *specs: str) -> InjectionPlan:
    return InjectionPlan(parse_injections(specs), rank, tmp_path)


def test_an_injection_is_due_for_its_rank_step_and_point_only(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, 1, "sigkill:rank=1@step=7,at=collective=2", "exit:rank=0@step=7")
    assert plan.collectives(7) == (2,)
    assert plan.collectives(6) == ()
    assert plan.due(6, Point.COLLECTIVE, 2) is None
    assert plan.due(7, Point.COLLECTIVE, 1) is None
    assert plan.due(7, Point.BEFORE_FORWARD) is None
    injection = plan.due(7, Point.COLLECTIVE, 2)
    assert injection is not None and injection.kind is InjectionKind.SIGKILL
    assert plan.is_empty
    record = json.loads((tmp_path / "injections" / "0.json").read_text())
    assert abs(record.pop("monotonic_s") - boottime_s()) < 5
    assert abs(record.pop("wall_s") - time.time()) < 5
    assert record == {
        "index": 0,
        "spec": "sigkill:rank=1@step=7,at=collective=2",
        "kind": "sigkill",
        "rank": 1,
        "step": 7,
        "point": "collective",
        "pid": os.getpid(),
    }


def test_an_injection_fires_once_also_when_the_step_runs_again_in_another_process(tmp_path: Path) -> None:
    spec = "sigkill:rank=1@step=7,at=after-optimizer"
    assert make_plan(tmp_path, 1, spec).due(7, Point.AFTER_OPTIMIZER) is not None
    later = make_plan(tmp_path, 1, spec)
    assert not later.is_empty
    assert later.due(7, Point.AFTER_OPTIMIZER) is None
    assert later.is_empty


def test_capture_and_replication_fire_at_the_first_captured_step_from_the_named_one_on(
    tmp_path: Path,
) -> None:
    plan = make_plan(tmp_path, 0, "sigkill:rank=0@step=7,at=capture", "exit:rank=0@step=8,at=replication")
    assert plan.due(6, Point.CAPTURE) is None
    assert plan.due(9, Point.CAPTURE) is not None
    assert plan.due(10, Point.CAPTURE) is None
    assert plan.due(10, Point.REPLICATION) is not None


def test_a_rank_without_injections_has_an_empty_plan(tmp_path: Path) -> None:
    assert make_plan(tmp_path, 3, "sigkill:rank=1@step=7").is_empty
    assert not (tmp_path / "injections").exists()


def test_a_bit_is_flipped_by_whoever_knows_the_tensors() -> None:
    flipped = []
    carry_out(parse_injection("bitflip:rank=0@step=1"), os.getppid(), flip_bit=lambda: flipped.append(True))
    assert flipped == [True]
    with pytest.raises(ValueError, match="flip_bit"):
        carry_out(parse_injection("bitflip:rank=0@step=1"), os.getppid())


# ---- the act, on real processes ----------------------------------------------------------------------

# Lines are written with one call each: four processes share the pipe.
_AGENT = """
import os, subprocess, sys
os.write(1, f"agent {os.getpid()}\\n".encode())
start = lambda kind: subprocess.Popen([sys.executable, "-c", sys.argv[1], kind, sys.argv[2]])
workers = [start("victim"), start("sibling")]
for worker in workers:
    worker.wait()
    os.write(1, f"ended {worker.returncode}\\n".encode())
sys.stdin.read()
"""
_WORKER = """
import os, subprocess, sys
from deadpool.testing.faults import carry_out, parse_injection
child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL) if sys.argv[1] == "sibling" else None
os.write(1, f"{sys.argv[1]} {os.getpid()}\\n".encode())
if child is not None:
    os.write(1, f"loader {child.pid}\\n".encode())
    child.wait()
sys.stdin.readline()
carry_out(parse_injection(sys.argv[2]), os.getppid())
"""


class Host:
    """An agent with two workers, one of which has a child; the victim waits for `strike`."""

    def __init__(self, spec: str) -> None:
        self.agent = subprocess.Popen(
            [sys.executable, "-c", _AGENT, _WORKER, spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.agent.stdin is not None and self.agent.stdout is not None
        self._stdin, self.stdout = self.agent.stdin, self.agent.stdout
        self.pids: dict[str, int] = {}
        while len(self.pids) < 4:
            name, pid = self.stdout.readline().split()
            self.pids[name] = int(pid)

    def strike(self) -> None:
        self._stdin.write("go\n")
        self._stdin.flush()

    def close(self) -> None:
        for pid in (*self.pids.values(), *descendants(self.agent.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stdin.close()
        self.agent.wait(10)
        self.stdout.close()


@pytest.fixture
def start_host() -> Iterator[Callable[[str], Host]]:
    hosts: list[Host] = []

    def start(spec: str) -> Host:
        hosts.append(Host(spec))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen within 10 s"
        threading.Event().wait(0.01)


def states(host: Host) -> dict[str, str]:
    return {name: state_of(pid) for name, pid in host.pids.items()}


@pytest.mark.parametrize(("kind", "code"), [("sigkill", -signal.SIGKILL), ("exit", 1)])
def test_a_worker_fault_takes_the_worker_and_nobody_else(
    start_host: Callable[[str], Host], kind: str, code: int
) -> None:
    host = start_host(f"{kind}:rank=0@step=1")
    host.strike()
    assert host.stdout.readline() == f"ended {code}\n"
    left = states(host)
    assert left.pop("victim") in "ZX"
    assert set("".join(left.values())) <= set("SRD")


def test_sigstop_stops_the_worker_and_nobody_else(start_host: Callable[[str], Host]) -> None:
    host = start_host("sigstop:rank=0@step=1")
    host.strike()
    wait_until(lambda: states(host)["victim"] == "T")
    assert [name for name, state in states(host).items() if state == "T"] == ["victim"]


def test_host_loss_kills_agent_workers_and_their_children_before_the_agent_sees_anything(
    start_host: Callable[[str], Host],
) -> None:
    host = start_host("host-loss:rank=0@step=1")
    host.strike()
    assert host.agent.wait(10) == -signal.SIGKILL
    wait_until(lambda: all(state in "ZX" for state in states(host).values()))
    assert host.stdout.read() == ""  # the agent reported no end of a worker


def test_host_stop_stops_agent_workers_and_their_children(start_host: Callable[[str], Host]) -> None:
    host = start_host("host-stop:rank=0@step=1")
    host.strike()
    wait_until(lambda: all(state == "T" for state in states(host).values()))
