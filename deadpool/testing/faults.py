"""Faults on purpose: the spec, the plan that a worker follows, and the act itself. Needs nothing of the CLI.

    KIND:rank=R@step=S[,at=POINT]

An injection is carried out by its victim or by a separate process. Nothing about it reaches agents, leader or
detector; the file it leaves in `<run dir>/injections/` is read by the report only. Each fires once per run,
even if step S is run again or R has moved to another host: the file is made with O_EXCL before the act.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import assert_never

from deadpool.config import nearest
from deadpool.errors import ConfigError
from deadpool.events import boottime_s
from deadpool.liveness.stat import parent_of


class InjectionKind(Enum):
    """What happens to the victim."""

    SIGKILL = "sigkill"  # the worker of the rank
    SIGSTOP = "sigstop"  # the worker of the rank, never resumed
    EXIT = "exit"  # the worker of the rank ends with code 1
    HOST_LOSS = "host-loss"  # agent and workers of the rank's host, SIGKILL
    HOST_STOP = "host-stop"  # all of them, SIGSTOP
    BITFLIP = "bitflip"  # one bit of one parameter: nobody is lost, but `verify` must notice

    @property
    def needs_recovery(self) -> bool:
        return self is not InjectionKind.BITFLIP

    @property
    def hits_host(self) -> bool:
        return self in (InjectionKind.HOST_LOSS, InjectionKind.HOST_STOP)


class Point(Enum):
    """Where in the step it happens."""

    BEFORE_FORWARD = "before-forward"
    COLLECTIVE = "collective"  # before the K-th collective of that step on that rank
    BEFORE_OPTIMIZER = "before-optimizer"
    IN_OPTIMIZER = "in-optimizer"
    AFTER_OPTIMIZER = "after-optimizer"
    CAPTURE = "capture"  # while the first captured step >= S is being copied
    REPLICATION = "replication"  # after that, while it travels

    @property
    def follows_capture(self) -> bool:
        return self in (Point.CAPTURE, Point.REPLICATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One planned fault."""

    kind: InjectionKind
    rank: int
    step: int
    point: Point = Point.COLLECTIVE
    collective: int = 1  # which collective of the step, counted from 1; only with Point.COLLECTIVE
    index: int = 0  # place among the injections of the run
    spec: str = ""


def parse_injection(spec: str, index: int = 0) -> Injection:
    """Read `KIND:rank=R@step=S[,at=POINT]`.

    Without `at`, a fault strikes before the first collective of the step, a bit flips after the optimizer.

    Raises:
        ConfigError: lists everything that is wrong with the spec.
    """
    where = f"--inject {spec}"
    kind_text, colon, rest = spec.partition(":")
    target, comma, option = rest.partition(",")
    rank_text, _, step_text = target.partition("@")
    problems: list[str] = []
    kinds = [kind.value for kind in InjectionKind]
    if kind_text not in kinds:
        near = nearest(kind_text, kinds)
        problems.append(f"{where}: unknown kind {kind_text!r}{near} (kinds: {', '.join(kinds)})")
    rank = read_number(rank_text, "rank", 0) if colon else None
    step = read_number(step_text, "step", 1) if colon else None
    if rank is None:
        problems.append(f"{where}: give the rank as rank=R, a number from 0")
    if step is None:
        problems.append(f"{where}: give the step as @step=S, a number from 1")
    point, collective = Point.COLLECTIVE, 1
    if comma:
        read = _read_point(option)
        if isinstance(read, str):
            problems.append(f"{where}: {read}")
        else:
            point, collective = read
    elif kind_text == InjectionKind.BITFLIP.value:
        point = Point.AFTER_OPTIMIZER
    if problems or rank is None or step is None:
        raise ConfigError(problems)
    return Injection(
        kind=InjectionKind(kind_text),
        rank=rank,
        step=step,
        point=point,
        collective=collective,
        index=index,
        spec=spec,
    )


def parse_injections(specs: Sequence[str], world_size: int | None = None) -> tuple[Injection, ...]:
    """Read all specs of a run.

    Raises:
        ConfigError: lists the problems of all of them, ranks outside the world included.
    """
    injections: list[Injection] = []
    problems: list[str] = []
    for index, spec in enumerate(specs):
        try:
            injection = parse_injection(spec, index)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if world_size is not None and injection.rank >= world_size:
            problems.append(f"--inject {spec}: ranks are 0 to {world_size - 1} in a world of {world_size}")
        injections.append(injection)
    if problems:
        raise ConfigError(problems)
    return tuple(injections)


class InjectionPlan:
    """What one worker, as one rank, must do to itself, and when.

    Args:
        injections: all injections of the run.
        rank: logical rank of this worker.
        run_dir: folder of the run.
    """

    def __init__(self, injections: Sequence[Injection], rank: int, run_dir: Path) -> None:
        self._folder = run_dir / "injections"
        self._open = [item for item in injections if item.rank == rank]

    @property
    def is_empty(self) -> bool:
        """Nothing is left to do: the training loop need not ask."""
        return not self._open

    def collectives(self, step: int) -> tuple[int, ...]:
        """Which collectives of `step`, counted from 1, somebody must watch for."""
        return tuple(
            sorted(
                item.collective for item in self._open if item.point is Point.COLLECTIVE and item.step == step
            )
        )

    def due(self, step: int, point: Point, collective: int = 1) -> Injection | None:
        """The injection to carry out now, already marked as fired, or None.

        Args:
            step: step in progress; for CAPTURE and REPLICATION the step being captured.
            point: where in the step this rank stands.
            collective: with COLLECTIVE, which one of the step is about to be issued.
        """
        for item in tuple(self._open):
            on_time = step >= item.step if point.follows_capture else step == item.step
            if item.point is not point or not on_time:
                continue
            if point is Point.COLLECTIVE and item.collective != collective:
                continue
            self._open.remove(item)
            if record_injection(self._folder / f"{item.index}.json", item, os.getpid()):
                return item
        return None


def record_injection(path: Path, injection: Injection, pid: int) -> bool:
    """Write that an injection fires now; False if it fired before, in this process or another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "index": injection.index,
        "spec": injection.spec,
        "kind": injection.kind.value,
        "rank": injection.rank,
        "step": injection.step,
        "point": injection.point.value,
        "pid": pid,
        "monotonic_s": boottime_s(),
        "wall_s": time.time(),
    }
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with open(fd, "wb", buffering=0) as file:
        file.write(json.dumps(record).encode())
    return True


def carry_out(injection: Injection, agent_pid: int, *, flip_bit: Callable[[], None] | None = None) -> None:
    """Do it, as the victim. Returns only for a bitflip, or when a stopped process is continued.

    Args:
        injection: what `InjectionPlan.due` returned.
        agent_pid: agent of this worker.
        flip_bit: changes one bit of one parameter; the worker knows its tensors.
    """
    match injection.kind:
        case InjectionKind.EXIT:
            os._exit(1)
        case InjectionKind.BITFLIP:
            if flip_bit is None:
                raise ValueError("a bitflip needs flip_bit")
            flip_bit()
        case _:
            strike(injection.kind, os.getpid(), agent_pid)


def strike(kind: InjectionKind, worker_pid: int, agent_pid: int) -> None:
    """Send the signals of one injection, to this process itself last.

    A lost host is stopped as a whole before it is killed: its agent must not see its workers die one by one,
    and its death would take this process along (PDEATHSIG) before the others are gone.
    """
    match kind:
        case InjectionKind.SIGKILL:
            os.kill(worker_pid, signal.SIGKILL)
        case InjectionKind.SIGSTOP:
            os.kill(worker_pid, signal.SIGSTOP)
        case InjectionKind.HOST_LOSS | InjectionKind.HOST_STOP:
            _strike_host(agent_pid, signal.SIGKILL if kind is InjectionKind.HOST_LOSS else signal.SIGSTOP)
        case InjectionKind.EXIT | InjectionKind.BITFLIP:
            raise ValueError(f"{kind.value} is done by the worker itself")
        case _ as never:
            assert_never(never)


def _strike_host(agent_pid: int, final: signal.Signals) -> None:
    own = os.getpid()
    send_signal(agent_pid, signal.SIGSTOP)
    stopped: list[int] = []
    own_is_victim = False
    while True:  # until a look finds nobody new: a stopped process forks no more
        family = descendants(agent_pid)
        own_is_victim = own_is_victim or own in family
        fresh = [pid for pid in family if pid != own and pid not in stopped]
        if not fresh:
            break
        for pid in fresh:
            send_signal(pid, signal.SIGSTOP)
        stopped.extend(fresh)
    if final is signal.SIGKILL:
        for pid in [*stopped, agent_pid]:
            send_signal(pid, final)
    if own_is_victim:
        send_signal(own, final)


def read_number(text: str, name: str, least: int) -> int | None:
    """The number in `name=NUMBER`, or None if it is not one from `least` on."""
    key, equals, digits = text.partition("=")
    if key != name or not equals or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) if int(digits) >= least else None


def _read_point(option: str) -> tuple[Point, int] | str:
    """Point and collective of `at=POINT`, or what is wrong with it."""
    key, equals, text = option.partition("=")
    points = [point.value for point in Point]
    if key != "at" or not equals:
        return f"{option!r} is not at=POINT"
    name, has_number, number = text.partition("=")
    if name not in points:
        return f"unknown point {name!r}{nearest(name, points)} (points: {', '.join(points)})"
    if not has_number:
        return Point(name), 1
    if name != Point.COLLECTIVE.value:
        return f"point {name} takes no number"
    collective = read_number(f"collective={number}", "collective", 1)
    return "collective=K counts from 1" if collective is None else (Point.COLLECTIVE, collective)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            parent = parent_of(int(entry.name))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.extend(below)
        waiting.extend(below)
    return found


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal a process; one that is already gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
