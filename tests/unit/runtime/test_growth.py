"""When another host is asked for, and how."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool.core.growth import lacks_spare
from deadpool.core.membership import Limits, State, initial_state
from deadpool.core.types import Member, Phase, View
from deadpool.events import EventLog
from deadpool.runtime.growth import Growth


def member(name: str) -> Member:
    return Member(id=name, host=name, address="h", control_port=1, data_port=2, rendezvous_port=3, nproc=1)


def state(
    *slots: str, spares: tuple[str, ...] = (), generation: int = 1, phase: Phase = Phase.RUNNING
) -> State:
    view = View(generation=generation, phase=phase, slots=slots, nproc=1)
    slot_of = {name: slot for slot, name in enumerate(slots) if name}
    members = tuple(map(member, [*filter(None, slots), *spares]))
    return replace(initial_state(Limits(), len(slots), 1), view=view, members=members, slot_of=slot_of)


@pytest.mark.parametrize(
    ("of", "had_spare", "lacks"),
    [
        (state("a", "b", spares=("c",)), True, False),
        (state("a", "b"), True, True),  # it was used, or lost
        (state("a", "b"), False, False),  # started without any
        (state("a", ""), False, True),
        (state("a", "b", phase=Phase.FINISHED), True, False),
        (initial_state(Limits(), 2, 1), True, False),
    ],
)
def test_a_spare_is_lacking_when_one_was_used_or_a_slot_is_vacant(
    of: State, had_spare: bool, lacks: bool
) -> None:
    assert lacks_spare(of, had_spare=had_spare) is lacks


def run_until(done: Callable[[], bool], growth: Growth, of: State) -> None:
    deadline_s = time.monotonic() + 20.0
    while not done():
        growth.tick(of)
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_command_runs_once_until_the_host_it_brings_had_time_to_join(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "r", "m", strict=True)
    growth = Growth(f"{sys.executable} -c pass", True, log)
    growth.tick(state("a", "b", spares=("c",)))
    assert not path.read_text()
    run_until(lambda: "growth.done" in path.read_text(), growth, state("a", "b"))
    for _ in range(5):
        growth.tick(state("a", "b"))
    growth.close()
    log.close()
    assert path.read_text().count("growth.begin") == 1


def test_hosts_that_wait_for_the_job_to_form_are_no_spares(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "r", "m", strict=True)
    growth = Growth("sleep 100", False, log)
    growth.tick(replace(initial_state(Limits(), 2, 1), members=(member("a"), member("b"))))
    growth.tick(state("a", "b"))
    growth.close()
    log.close()
    assert "growth.begin" not in path.read_text()


def test_a_command_that_fails_is_not_tried_again_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "r", "m", strict=True)
    growth = Growth(f"{sys.executable} -c exit(3)", False, log)
    run_until(lambda: "growth.failed" in path.read_text(), growth, state("a", ""))
    growth.tick(state("a", ""))
    log.close()
    assert "code 3" in path.read_text()
    assert path.read_text().count("growth.begin") == 1


def test_a_command_that_still_waits_ends_with_its_agent(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "r", "m", strict=True)
    growth = Growth("sleep 100", False, log)
    growth.tick(state("a", ""))
    assert "growth.begin" in path.read_text()
    growth.close()
    log.close()  # the leak check would find the process


def test_a_new_leader_asks_for_the_spare_that_the_one_before_saw_used(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "r", "m", strict=True)
    growth = Growth(f"{sys.executable} -c pass", True, log)
    growth.tick(state("a", "b", generation=1))
    assert "growth.begin" not in path.read_text()  # spares may still be on their way
    growth.tick(state("a", "b", generation=2))
    growth.close()
    log.close()
    assert "growth.begin" in path.read_text()
