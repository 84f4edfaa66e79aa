"""`deadpool verify`: does a disturbed run end exactly as an undisturbed one?

The script runs twice in fresh processes and folders, the first time without injections. "yes" needs equal
bits AND proof that something happened: every injection fired, a recovery followed, no survivor changed its
process, a step was committed, and training changed the state. The last line is for machines; reasons stand
before it.
"""

from __future__ import annotations

import ctypes
import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

import deadpool
from deadpool.cli.compare import Difference, compare_runs
from deadpool.cli.options import run_arguments
from deadpool.cli.rundir import RankDigests, read_digests, read_events, read_injections, read_workers
from deadpool.config import Config, settings
from deadpool.errors import ConfigError, ExitCode
from deadpool.testing.faults import Injection, parse_injections

LAST_LINE = "bit-identical to the undisturbed run: "
_MAX_SHOWN = 10  # differences shown before the last line
_PR_SET_PDEATHSIG = 1
_STOP_GRACE_S = 30.0  # a run that was told to end; its own limits are shorter
_PASSED_THROUGH = (
    ExitCode.BAD_INPUT,
    ExitCode.CONTROL_PLANE_UNREACHABLE,
    ExitCode.INTERRUPTED,
    ExitCode.TERMINATED,
)
"""Exit codes of a run that say something about the command or its surroundings, not about recovery."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What an undisturbed run was made from: it may be used again for exactly the same."""

    settings: dict[str, str]
    script_sha256: str
    version: str


_NOT_STAMPED = frozenset(
    {
        "job.job_id",
        "run.inject",
        "run.run_dir",
        "run.record_dir",
        "run.events",
        "run.report",
        "checkpoint.dir",
    }
)
"""Settings that say where and under which name, not what; or only how the disturbed run is disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a verification."""

    exit_code: int
    difference: Difference | None  # None: bit-identical


Run = Callable[[Sequence[str]], int]
"""Does `deadpool run` with these arguments, in a process of its own; returns its exit code."""


def verify_command(config: Config, undisturbed: str | None = None, *, run: Run | None = None) -> int:
    """Run, run again with the injections, compare, print; returns the exit code.

    Args:
        config: as the command line gave it.
        undisturbed: folder that keeps the undisturbed run for the next time, or holds it from the last.
        run: for tests.

    Raises:
        ConfigError: not standalone, or a folder that is not fresh.
    """
    run = run or run_process
    if not config.run.standalone:
        raise ConfigError(["verify starts all hosts itself: give --standalone"])
    injections = parse_injections(config.run.inject, config.world_size)
    if not injections:
        why = "no --inject was given, so no recovery can happen"
        return _conclude(
            Outcome(exit_code=ExitCode.STATE_LOST, difference=Difference(rank=0, step=0, what=why))
        )
    base = Path(config.run.run_dir or f"deadpool-runs/verify-{time.strftime('%Y%m%d-%H%M%S')}")
    before = Path(undisturbed) if undisturbed else base / "undisturbed"
    after = base / "disturbed"
    for folder in (after, *(() if undisturbed else (before,))):
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError([f"{folder} is not empty: verify wants a fresh --run-dir"])
    code = _undisturbed_run(config, before, run)
    if code:
        print(f"deadpool: the undisturbed run ended with code {code}: there is nothing to compare with")
        return code
    print(f"deadpool: now with {', '.join(config.run.inject)}", flush=True)
    code = run(disturbed_arguments(config, after))
    if code in _PASSED_THROUGH:
        print(f"deadpool: the disturbed run ended with code {code}")
        return code
    if code:
        what = f"the disturbed run ended with code {code}"
        difference = Difference(rank=injections[-1].rank, step=injections[-1].step, what=what)
        return _conclude(Outcome(exit_code=ExitCode.STATE_LOST, difference=difference))
    return _conclude(judge_runs(before, after, config, injections))


def judge_runs(before: Path, after: Path, config: Config, injections: Sequence[Injection]) -> Outcome:
    """Compare two finished runs and say why they are equal, different, or prove nothing."""
    comparison = compare_runs(before, after, config.world_size)
    if not comparison.has_records:
        print("deadpool: nothing was recorded with ft.record: only the final state is compared")
    if comparison.differences:
        for difference in comparison.differences[:_MAX_SHOWN]:
            print(f"deadpool: {_describe(difference)}")
        left = len(comparison.differences) - _MAX_SHOWN
        if left > 0:
            print(f"deadpool: and {left} more")
        return Outcome(exit_code=ExitCode.USER_ERROR, difference=comparison.differences[0])
    doubts = [*_undisturbed_doubts(before), *find_doubts(after, config, injections)]
    for doubt in doubts:
        print(f"deadpool: {_describe(doubt)}")
    if doubts:
        return Outcome(exit_code=ExitCode.STATE_LOST, difference=doubts[0])
    return Outcome(exit_code=ExitCode.FINISHED, difference=None)


def find_doubts(run_dir: Path, config: Config, injections: Sequence[Injection]) -> list[Difference]:
    """Why equal bits prove nothing: what should have happened in the disturbed run and did not."""
    events = read_events(run_dir)
    fired = {record.index: record for record in read_injections(run_dir)}
    done_s = [float(event["monotonic_s"]) for event in events if event["event"] == "recovery.done"]
    digests = read_digests(run_dir)
    doubts = []
    for injection in injections:
        record = fired.get(injection.index)
        where = {"rank": injection.rank, "step": injection.step}
        if record is None:
            doubts.append(Difference(**where, what=f"{injection.spec} did not fire"))
        elif injection.kind.needs_recovery and not any(moment > record.monotonic_s for moment in done_s):
            doubts.append(Difference(**where, what=f"no recovery followed {injection.spec}"))
        elif injection.kind.needs_recovery and _pid_of(digests.get(injection.rank)) == record.pid:
            what = f"process {record.pid} was struck by {injection.spec} and ran on"
            doubts.append(Difference(**where, what=what))
    if not any(injection.kind.needs_recovery for injection in injections):
        where = {"rank": injections[0].rank, "step": injections[0].step}
        doubts.append(Difference(**where, what="no injection needs a recovery"))
    doubts.extend(_changed_survivors(run_dir, config, injections))
    committed = [event.get("step", 0) for event in events if event["event"] == "snapshot.committed"]
    if max(committed, default=0) < 1:
        doubts.append(Difference(rank=0, step=0, what="no step was committed"))
    return doubts


def _undisturbed_doubts(run_dir: Path) -> list[Difference]:
    """Why the undisturbed run is no measure."""
    doubts = []
    for event in read_events(run_dir):
        if event["event"] == "recovery.begin":
            what = f"the undisturbed run had a recovery itself: {event.get('reason', 'no reason given')}"
            doubts.append(Difference(rank=0, step=int(event.get("step", 0)), what=what))
    digests = read_digests(run_dir).values()
    if all(item.initial == item.final for item in digests):
        last = max((item.steps for item in digests), default=0)
        doubts.append(Difference(rank=0, step=last, what="the final state equals the initial one"))
    return doubts


def _pid_of(digests: RankDigests | None) -> int | None:
    return None if digests is None else digests.pid


def _changed_survivors(run_dir: Path, config: Config, injections: Sequence[Injection]) -> list[Difference]:
    """Ranks of hosts that nothing was done to, and that have another process than before."""
    nproc = config.job.nproc_per_node
    struck = {item.rank // nproc for item in injections if item.kind.needs_recovery}
    pids: dict[int, list[int]] = {rank: [] for rank in range(config.world_size)}
    for line in read_workers(run_dir):
        if line.pid not in pids[line.rank]:
            pids[line.rank].append(line.pid)
    for rank, digests in read_digests(run_dir).items():
        if digests.pid not in pids[rank]:
            pids[rank].append(digests.pid)
    return [
        Difference(rank=rank, step=0, what=f"a survivor's process changed: pids {', '.join(map(str, found))}")
        for rank, found in pids.items()
        if rank // nproc not in struck and len(found) != 1
    ]


def undisturbed_arguments(config: Config, folder: Path) -> list[str]:
    """Command line of the run without injections; nothing of it leaves `folder`."""
    return run_arguments(
        config, {**_folders(config, folder), "run.inject": (), "run.events": None, "run.report": None}
    )


def disturbed_arguments(config: Config, folder: Path) -> list[str]:
    """Command line of the run with injections."""
    return run_arguments(config, _folders(config, folder))


def _folders(config: Config, folder: Path) -> dict[str, object]:
    return {
        "run.run_dir": str(folder),
        "run.record_dir": str(folder / "records"),
        "checkpoint.dir": str(folder / "checkpoints") if config.checkpoint.dir else None,
        "job.job_id": f"{config.job.job_id}-{folder.name}" if config.job.job_id else None,
    }


def _undisturbed_run(config: Config, folder: Path, run: Run) -> int:
    """Make the undisturbed run unless `folder` holds the same one already; returns its exit code."""
    stamp = _make_stamp(config)
    path = folder / "verify.json"
    if path.exists():
        if msgspec.json.decode(path.read_bytes(), type=Stamp) != stamp:
            raise ConfigError([f"{folder} holds the undisturbed run of another command: name another folder"])
        print(f"deadpool: the undisturbed run is taken from {folder}", flush=True)
        return 0
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError([f"{folder} holds something else, or an unfinished run: name another folder"])
    print("deadpool: first undisturbed", flush=True)
    code = run(undisturbed_arguments(config, folder))
    if code == 0:
        path.write_bytes(msgspec.json.encode(stamp))
    return code


def _make_stamp(config: Config) -> Stamp:
    shown = {
        setting.name: repr(getattr(getattr(config, setting.section), setting.field))
        for setting in settings()
        if setting.name not in _NOT_STAMPED and not setting.secret
    }
    digest = hashlib.sha256(Path(config.run.script).read_bytes()).hexdigest()
    return Stamp(settings=shown, script_sha256=digest, version=deadpool.__version__)


def run_process(arguments: Sequence[str]) -> int:
    """`deadpool run` in a process of its own; what ends this command ends it, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _ForwardedSignals() as signals:
        process = subprocess.Popen(
            [sys.executable, "-m", "deadpool", "run", *arguments],
            start_new_session=True,  # Ctrl-C reaches it once, through us
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # if we are killed, it ends
        )
        signals.forward_to(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


class _ForwardedSignals:
    """Passes SIGTERM, SIGINT and SIGHUP on to a process, and kills it if it does not end in time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []  # arrived before the process was there
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _ForwardedSignals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._forward)
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._kill)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def forward_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        while self._early:
            self._forward(self._early.pop(0), None)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
            return
        self._process.send_signal(number)
        signal.setitimer(signal.ITIMER_REAL, _STOP_GRACE_S)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.kill()


def _conclude(outcome: Outcome) -> int:
    if outcome.difference is None:
        print(f"{LAST_LINE}yes", flush=True)
    else:
        print(f"{LAST_LINE}no: {_describe(outcome.difference)}", flush=True)
    return int(outcome.exit_code)


def _describe(difference: Difference) -> str:
    return f"rank {difference.rank}, step {difference.step}, {difference.what}"
