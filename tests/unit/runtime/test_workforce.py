"""The workers of one host: what becomes of one that does not go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from deadpool.config import Config
from deadpool.runtime.workforce import Worker, WorkerState, Workforce, WorkforceCallbacks
from tests.unit.runtime.support import WAIT_S, Loop


def _ignore(*_: Any) -> None:
    pass


class Workers:
    """One worker, and what its agent is told of workers that stay."""

    def __init__(self, folder: Path, reap_timeout_s: float) -> None:
        config = Config()
        config = replace(config, communicator=replace(config.communicator, reap_timeout_s=reap_timeout_s))
        self.unreaped: list[Worker] = []
        callbacks: dict[str, Any] = {field.name: _ignore for field in fields(WorkforceCallbacks)}
        self.workforce = Workforce(
            config, folder, Loop().post, WorkforceCallbacks(**{**callbacks, "unreaped": self.unreaped.append})
        )
        self.workforce.start(1)
        (self.worker,) = self.workforce.workers

    def close(self) -> None:
        assert self.worker.handle.reap(WAIT_S)
        self.workforce.stop_all(WAIT_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[float], Workers]]:
    made: list[Workers] = []

    def start_one(reap_timeout_s: float) -> Workers:
        made.append(Workers(tmp_path, reap_timeout_s))
        made[0].worker.enter(WorkerState.RUNNING)
        return made[0]

    yield start_one
    made[0].close()


def test_a_worker_that_makes_room_for_a_fresh_one_is_reaped(start: Callable[[float], Workers]) -> None:
    workers = start(WAIT_S)
    workers.workforce.restart_all()
    assert workers.worker.handle.process.returncode is not None
    assert workers.unreaped == []
    assert not workers.worker.is_stuck


def test_a_worker_that_makes_room_for_a_fresh_one_and_does_not_go_is_told(
    start: Callable[[float], Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = start(0.1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", _ignore)  # as the kernel does with what is stuck in a driver
        workers.workforce.restart_all()
    assert workers.unreaped == [workers.worker]
    assert workers.worker.is_stuck
    assert workers.workforce.workers != [workers.worker]
