"""The agent as a process: signals, incarnations, exit codes."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

from deadpool.config import Config
from deadpool.errors import ConfigError, DeadPoolError, ExitCode, Fenced, StoreUnavailable
from deadpool.liveness.health import check_health
from deadpool.outlet import OutletHandler
from deadpool.runtime.agent import Agent
from deadpool.runtime.descriptors import raise_descriptor_limit
from deadpool.runtime.ending import STORE_LIMIT_S, Replaced
from deadpool.runtime.starting import Launch

RETRY_S = 1.0

REJOIN_DELAY_S = 1.0
"""A replaced host comes back after this, unless a slot is vacant. Its fresh workers load torch for seconds of
CPU, which the first steps after a recovery lack where hosts share a machine (2 cores: 1.6 times as long).
"""


def run_agent(
    config: Config,
    run_dir: Path,
    host: str,
    token: str,
    run_id: str = "",
    on_token: Callable[[str], None] | None = None,
) -> int:
    """Run a host until the job ends; a replaced incarnation comes back as a new one, a spare.

    Args:
        config: configuration of the job.
        run_dir: folder of the run.
        host: label of this host.
        token: the launch's token.
        run_id: equal for all agents of one launch; "" if they are started one by one.
        on_token: told the job's token, which is another agent's if that one came first.

    Returns:
        The exit code.
    """
    lines = f"[{host}] %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=lines, handlers=[OutletHandler()])
    current: list[Agent] = []
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)  # noticed at the agent's next tick
        if current:
            current[0].ending.signal = number

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    _lower_oom_score()
    raise_descriptor_limit()  # a leader has four connections to every host
    health = check_health()
    if not health.is_healthy:
        return _complain(health.problems, ExitCode.USER_ERROR)
    launch = Launch(run_id=run_id, token=token, on_token=on_token)
    return _live(config, run_dir, host, launch, current, received)


def _live(
    config: Config,
    run_dir: Path,
    host: str,
    launch: Launch,
    current: list[Agent],
    received: list[int],
    retry_until_s: float = 0.0,
) -> int:
    """Be one incarnation after the other; returns the exit code of the last.

    Args:
        config, run_dir, host: as of `run_agent`.
        launch: of the first incarnation.
        current: gets the incarnation that lives, for signals.
        received: signals so far.
        retry_until_s: monotonic time until which a control plane that cannot be reached is tried again.
    """
    while True:
        agent = Agent(config, run_dir, host, launch)
        current[:] = [agent]
        if received:
            agent.ending.signal = received[-1]
        try:
            return agent.run()
        except Replaced as error:
            # The wish for a slot is for the first start only.
            config = replace(config, run=replace(config.run, node_rank=None))
            launch = Launch(run_id=launch.run_id, token=agent.token, is_return=True)
            retry_until_s = time.monotonic() + STORE_LIMIT_S
            if not error.is_awaited:
                threading.Event().wait(REJOIN_DELAY_S)
        except Fenced as error:
            return _complain((str(error),), ExitCode.REPLACED)
        except ConfigError as error:
            return _complain(error.problems, ExitCode.BAD_INPUT)
        except StoreUnavailable as error:
            if time.monotonic() < retry_until_s and not received:
                # Replaced because it was cut off: it may take a while to be heard again.
                is_unknown = agent.lease is None  # nobody has heard of this id: it serves the next try, too
                launch = replace(launch, member=agent.id if is_unknown else "")
                threading.Event().wait(RETRY_S)
                continue
            problem = f"control plane unreachable: {error}"
            return _complain((problem,), ExitCode.CONTROL_PLANE_UNREACHABLE)
        except DeadPoolError as error:
            return _complain((str(error),), ExitCode.USER_ERROR)


def _complain(problems: tuple[str, ...], code: ExitCode) -> int:
    for problem in problems:
        print(f"deadpool: {problem}", file=sys.stderr, flush=True)
    return int(code)


def _lower_oom_score() -> None:
    """The agent holds the copies: it should be the last to be killed for memory."""
    try:
        Path("/proc/self/oom_score_adj").write_text("-500")
    except OSError:
        pass  # not privileged: the kernel decides
