"""One run of one configuration: its events, logs and usage land in a folder of their own.

Everything is started in a session of its own and ended by pid; nothing is left running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from configurations import HERE, processes_of
from resources import find_processes, sample

POLL_S = 0.25
TERMINATE_S = 5.0
WARM_STEPS = int(os.environ.get("WARM_STEPS", "16"))
"""Steps at the start that no figure uses. DDP rebuilds its buckets after the first, which cannot be captured;
DeadPool then captures every other step until eight of them are committed, and from then on all.
"""


class UsageMeter:
    """Samples the usage of a run once its steps reach `first`, and again when they reach `last`."""

    def __init__(self, out: Path, first: int, last: int) -> None:
        self._out = out
        self._waiting = [step for step in (first, last) if step > 0]
        self._samples: list[object] = []

    def look(self) -> None:
        if self._waiting and _newest_step(self._out) >= self._waiting[0]:
            self._waiting.pop(0)
            self._samples.append(sample(self._out))
            (self._out / "usage.json").write_text(json.dumps(self._samples))


def run(configuration: str, out: Path, *, steps: int, kill: int, kill_rank: int, timeout_s: float) -> str:
    """Run once; returns "ok", or "timeout", or "failed" if a main process ended with an error."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    checkpoints = _checkpoint_folder(configuration, out)
    # The second sample is taken in time before the fault, or before the ranks end.
    last = (kill or steps) - 1 - (steps > 10)
    meter = UsageMeter(out, min(WARM_STEPS + 1, last - 1), last)
    environment = {
        **os.environ,
        "RUN_DIR": str(out),
        "STEPS": str(steps),
        "KILL_STEP": str(kill),
        "KILL_RANK": str(kill_rank),
        "CKPT_DIR": str(checkpoints),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
        "GLOO_SOCKET_IFNAME": "lo",
        # torch 2.13 shares one store over all restarts, without a prefix: stale gloo addresses break them.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    began_s = time.time()
    started = []
    with contextlib.ExitStack() as files:
        for each in processes_of(configuration, out):
            log = files.enter_context(open(out / f"{each.name}.log", "w"))
            process = subprocess.Popen(
                each.command,
                env={**environment, **each.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=out,
            )
            started.append((each, process))
    mains = [process for each, process in started if each.is_main]
    status = "ok"
    while any(process.poll() is None for process in mains):
        if time.time() - began_s > timeout_s:
            status = "timeout"
            break
        time.sleep(POLL_S)
        meter.look()
    codes = {each.name: process.poll() for each, process in started}
    _end_all([process for _, process in started], out)
    shutil.rmtree(checkpoints, ignore_errors=True)
    finals = [line for line in _lines(out) if '"final"' in line]
    if status == "ok" and not finals:
        status = "failed"
    facts = {"cfg": configuration, "steps": steps, "kill": kill, "status": status, "t0": began_s, "rc": codes}
    (out / "run.json").write_text(json.dumps({**facts, "wall": time.time() - began_s}))
    return status


def _checkpoint_folder(configuration: str, out: Path) -> Path:
    """On tmpfs, which favours the peers, unless the configuration says disk."""
    if "disk" in configuration:
        folder = out / "ckpt"
        folder.mkdir()
        return folder
    return Path(tempfile.mkdtemp(prefix="deadpool-peers-", dir=os.environ.get("PEERS_CKPT_ROOT", "/dev/shm")))


def _end_all(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + TERMINATE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in find_processes(out):  # helpers that made themselves daemons
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _lines(out: Path) -> list[str]:
    path = out / "events.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _newest_step(out: Path) -> int:
    steps = [json.loads(line)["step"] for line in _lines(out) if '"ev": "step"' in line]
    return max(steps, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", help="see configurations.py")
    parser.add_argument("out", type=Path, help="folder of the run; what it holds is removed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kill", type=int, default=0, help="step in which the fault strikes; 0: none")
    parser.add_argument("--kill-rank", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    began_s = time.time()
    status = run(
        arguments.configuration,
        out,
        steps=arguments.steps,
        kill=arguments.kill,
        kill_rank=arguments.kill_rank,
        timeout_s=arguments.timeout,
    )
    print(f"{arguments.configuration}: {status}, {time.time() - began_s:.1f} s", flush=True)
    raise SystemExit(status != "ok")


if __name__ == "__main__":
    main()
