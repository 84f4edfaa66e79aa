"""How an agent comes to its end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from deadpool.config import Config
from deadpool.core.types import Name, Phase
from deadpool.events import EventLog
from deadpool.runtime.ending import AgentEnd, Ending, EndingCallbacks
from deadpool.runtime.workforce import Workforce, WorkforceCallbacks
from tests.unit.runtime.support import WAIT_S, make_view


class Checkpoints:
    """A slow folder: what is saved is not durable yet."""

    def __init__(self) -> None:
        self.saved: list[Name] = []

    def save(self, ranks: range, name: Name) -> None:
        self.saved.append(name)

    def is_durable(self, name: Name) -> bool:
        return False


def never(*_: object) -> Any:
    raise AssertionError("a host that has not joined the job has nothing to ask for")


def make_ending(folder: Path, **known: Any) -> tuple[Ending, Workforce]:
    workforce = Workforce(
        Config(),
        folder,
        never,
        WorkforceCallbacks(message=never, parked=never, lost=never, unreaped=never, ended=never),
    )
    asked = dict.fromkeys(("pid_of", "protected", "ranks", "begun", "job_view", "summarise"), never)
    callbacks = EndingCallbacks(
        **{**asked, **{name: lambda value=value: value for name, value in known.items()}}
    )
    return Ending(folder, workforce, EventLog(None, "run", "h0"), callbacks, grace_s=30.0), workforce


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_host_at_once_that_has_not_joined_the_job(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    ending, workforce = make_ending(tmp_path)
    try:
        ending.check_signal(None)
        ending.signal = number
        with pytest.raises(AgentEnd) as end:
            ending.check_signal(None)
    finally:
        workforce.stop_all(WAIT_S)
    assert end.value.code == code


@pytest.mark.parametrize(
    ("phase", "is_saved", "ends"),
    [
        (Phase.RUNNING, True, False),  # once it is durable
        (Phase.STALLED, True, False),
        (Phase.ABORTING, False, False),  # until it is known what the recovery goes back to
        (Phase.RESTORING, False, False),
        (Phase.FORMING, False, True),
    ],
)
def test_sigterm_after_a_recovery_saves_what_it_went_back_to_although_no_holder_has_it_yet(
    tmp_path: Path, phase: Phase, is_saved: bool, ends: bool
) -> None:
    back_to = Name(step=6, generation=1)
    view = make_view(
        ("a", "b"), generation=2, phase=phase, rollback=back_to if phase is not Phase.FORMING else None
    )
    ending, workforce = make_ending(tmp_path, protected=None, begun=None, ranks=range(1), job_view=view)
    checkpoints = Checkpoints()
    ending.signal = signal.SIGTERM
    try:
        if ends:
            with pytest.raises(AgentEnd):
                ending.check_signal(checkpoints)  # type: ignore[arg-type]
        else:
            ending.check_signal(checkpoints)  # type: ignore[arg-type]
    finally:
        workforce.stop_all(WAIT_S)
    assert checkpoints.saved == ([back_to] if is_saved else [])


def test_only_the_end_of_the_job_or_a_signal_to_a_formed_one_lets_its_records_be_erased(
    tmp_path: Path,
) -> None:
    for view, number, is_of_job in (
        (None, signal.SIGTERM, False),  # others still load
        (make_view(("a", "b")), 0, False),  # this host was replaced
        (make_view(("a", "b")), signal.SIGTERM, True),
    ):
        ending, workforce = make_ending(tmp_path, job_view=view)
        ending.signal = number
        assert ending.is_of_job() is is_of_job
        workforce.stop_all(WAIT_S)
