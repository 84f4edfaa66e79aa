"""How an agent comes to its end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from deadpool.config import Config
from deadpool.events import EventLog
from deadpool.runtime.ending import AgentEnd, Ending, EndingCallbacks
from deadpool.runtime.workforce import Workforce, WorkforceCallbacks
from tests.unit.runtime.support import WAIT_S


def never(*_: object) -> Any:
    raise AssertionError("a host that has not joined the job has nothing to ask for")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_host_at_once_that_has_not_joined_the_job(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    workforce = Workforce(
        Config(),
        tmp_path,
        never,
        WorkforceCallbacks(message=never, parked=never, lost=never, unreaped=never, ended=never),
    )
    callbacks = EndingCallbacks(pid_of=never, protected=never, ranks=never, begun=never, summarise=never)
    ending = Ending(tmp_path, workforce, EventLog(None, "run", "h0"), callbacks, grace_s=30.0)
    try:
        ending.check_signal(None)
        ending.signal = number
        with pytest.raises(AgentEnd) as end:
            ending.check_signal(None)
    finally:
        workforce.stop_all(WAIT_S)
    assert end.value.code == code
