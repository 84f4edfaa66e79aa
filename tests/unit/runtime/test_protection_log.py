"""What an operator is told of protection: lines, the list in the status, and when they end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deadpool.core.types import Name
from deadpool.events import EventLog
from deadpool.runtime.protection_log import ProtectionLog
from tests.unit.runtime.support import read_events

MOVED = "the training state is no longer what wrap was given: w moved to other memory. Change it in place"


def named(step: int) -> Name:
    return Name(step=step, generation=3)


class Said:
    """A log of one agent, with what it wrote and what it printed."""

    def __init__(self, path: Path) -> None:
        self.lines: list[str] = []
        self.saved: list[tuple[Name, int]] = []
        self._path = path
        self.events = EventLog(path, "run", "test", console=self.lines.append, strict=True)
        self.log = ProtectionLog(self.events, 10, lambda *what: self.saved.append(what), lambda: 3)

    def named(self, name: str) -> list[dict[str, Any]]:
        return read_events(self._path, name)


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Said]:
    made = Said(tmp_path / "events.jsonl")
    yield made
    made.events.close()


def test_a_rank_that_cannot_be_captured_any_more_is_told_at_once_with_step_and_remedy(said: Said) -> None:
    said.log.committed(named(7))
    said.log.refused(1, 9, MOVED, True)
    reason = f"no step after 7 is protected: rank 1 cannot be captured since step 9: {MOVED}"
    assert said.log.degraded == (reason,)
    assert said.lines == [f"degraded: {reason}"]
    (event,) = said.named("snapshot.degraded")
    assert (event["rank"], event["step"], event["generation"]) == (1, 9, 3)


def test_it_is_told_once_for_a_rank_although_every_step_is_refused_in_other_words(said: Said) -> None:
    for step in range(9, 30):
        for rank in (0, 1):
            said.log.refused(rank, step, f"the small state of step {step} takes {1000 * step} bytes", True)
    assert len(said.lines) == len(said.log.degraded) == 2
    assert all("since step 9" in line for line in said.lines)
    assert len(said.named("snapshot.refused")) == 42


def test_a_refusal_that_may_pass_is_an_event_only(said: Said) -> None:
    said.log.refused(1, 9, "its boundary had passed", False)
    assert said.lines == []
    assert said.log.degraded == ()
    assert len(said.named("snapshot.refused")) == 1


def test_the_next_commit_ends_it_and_what_comes_then_is_told_again(said: Said) -> None:
    said.log.refused(1, 9, MOVED, True)
    said.log.failed(1, 9, "refused: holder is full")
    said.log.committed(named(12))
    assert said.log.degraded == ()
    assert said.lines[-1] == "protected again up to step 12"
    said.log.refused(1, 13, MOVED, True)
    assert said.lines[-1].startswith("degraded: no step after 12 is protected: rank 1")


def test_a_copy_that_is_not_delivered_is_told_once_for_each_reason(said: Said) -> None:
    for why in ("holder is full", "holder is full", "no route"):
        said.log.failed(2, 5, why)
    assert said.log.degraded == (
        "copies of rank 2 do not reach their holder: holder is full",
        "copies of rank 2 do not reach their holder: no route",
    )


def test_steps_that_go_on_unprotected_are_told_once_by_the_host_of_rank_0(said: Said) -> None:
    for seconds in range(81, 90):
        said.log.unprotected(named(7), 100 + seconds, float(seconds), True)
    assert said.lines == [
        "degraded: no step after 7 is protected, for 81 s of training: "
        "see snapshot.refused in the events of all hosts"
    ]
    assert len(said.log.degraded) == 1


def test_another_host_tells_it_only_if_one_of_its_ranks_refused_a_step(said: Said) -> None:
    said.log.unprotected(None, 100, 81.0, False)
    assert said.lines == []
    said.log.refused(3, 99, "model: gradients that are not reduced yet are carried over", False)
    said.log.unprotected(None, 100, 81.0, False)
    assert said.log.degraded == (
        "no step is protected, for 81 s of training: rank 3 refused step 99: "
        "model: gradients that are not reduced yet are carried over",
    )


def test_a_host_that_has_told_the_cause_does_not_tell_the_age_as_well(said: Said) -> None:
    said.log.failed(2, 5, "holder is full")
    said.log.unprotected(named(4), 100, 81.0, True)
    assert len(said.lines) == 1


def test_a_committed_step_is_saved_once_for_each_interval_of_checkpoints(said: Said) -> None:
    for step in (3, 11, 14, 20):
        said.log.committed(named(step))
    assert said.saved == [(named(11), 1), (named(20), 2)]
