"""What the leader sums up of a recovery."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from deadpool.core.types import Ack, Name, Phase
from deadpool.runtime.timeline import Timeline
from tests.unit.runtime.support import make_view, open_log, read_events

SLOTS = ("a", "b")


def attempt(timeline: Timeline, generation: int, last_steps: dict[str, int], back_to: Name) -> None:
    """A generation up to the moment at which its hosts have restored."""
    aborting = make_view(SLOTS, generation=generation, phase=Phase.ABORTING)
    restoring = make_view(SLOTS, generation=generation, phase=Phase.RESTORING, rollback=back_to)
    timeline.published(None, aborting)
    for member, step in last_steps.items():
        timeline.acked(Ack(member=member, generation=generation, phase=Phase.ABORTING, last_step=step))
    timeline.published(aborting, restoring)


def run(timeline: Timeline, generation: int, rollback: Name) -> None:
    timeline.published(None, make_view(SLOTS, generation=generation, phase=Phase.RUNNING, rollback=rollback))


def test_steps_are_lost_also_where_an_attempt_had_restored_before_the_one_that_ran(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    log = open_log(tmp_path / "events.jsonl")
    timeline = Timeline(log, lambda generation, summary: kept.append(summary))
    five, three = Name(step=5, generation=1), Name(step=3, generation=1)
    attempt(timeline, 2, {"a": 9, "b": 8}, five)
    attempt(timeline, 3, {"a": 5, "b": 5}, three)  # they have restored, and say so
    run(timeline, 3, three)
    attempt(timeline, 4, {"a": 7, "b": 7}, Name(step=7, generation=3))  # another recovery
    run(timeline, 4, Name(step=7, generation=3))
    log.close()
    assert [summary["lost_steps"] for summary in kept] == [5, 0]
    done = read_events(tmp_path / "events.jsonl", "recovery.done")
    assert [event["lost_steps"] for event in done] == [5, 0]


def test_a_leader_that_takes_over_counts_from_when_the_job_stopped(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    log = open_log(tmp_path / "events.jsonl")
    timeline = Timeline(log, lambda generation, summary: kept.append(summary))
    restoring = make_view(SLOTS, generation=2, phase=Phase.RESTORING, rollback=Name(step=5, generation=1))
    timeline.resume(restoring, SLOTS, time.monotonic() - 100.0)
    run(timeline, 2, Name(step=5, generation=1))
    log.close()
    assert 100.0 <= kept[0]["seconds"] < 160.0
