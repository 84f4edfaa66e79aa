"""The benchmarks run, and their tables say what the runs left: a yardstick that rots measures nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
STEP_S = 0.25


def call(script: str, *arguments: str, timeout_s: float = 30, **environment: str) -> str:
    command = [sys.executable, str(PEERS / script), *arguments]
    environment = {**os.environ, "WARM_STEPS": "2", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def leave_run(
    folder: Path,
    configuration: str,
    steps: Sequence[tuple[float, int, int]],
    *,
    began_s: float,
    kill: int = 0,
) -> None:
    """Write what a run leaves; `steps` are (seconds since the begin, pid, step)."""
    folder.mkdir(parents=True)
    last = max(step for _, _, step in steps)
    facts = {"cfg": configuration, "steps": last, "kill": kill, "status": "ok", "t0": began_s}
    events: list[dict[str, object]] = [
        {"t": began_s + at_s, "ev": "step", "pid": pid, "step": step, "world": 2, "cpu": at_s / 2}
        for at_s, pid, step in steps
    ]
    if kill:
        events.append({"t": began_s + (kill - 1) * STEP_S + 0.1, "ev": "kill", "pid": 2, "step": kill})
    events.append({"t": began_s + 1000, "ev": "final", "pid": 1, "hash": "same"})
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_tables_compare_with_the_plain_run_of_the_round_and_time_the_recovery(tmp_path: Path) -> None:
    steps = [(step * STEP_S, pid, step) for step in range(1, 11) for pid in (1, 2)]
    leave_run(tmp_path / "r1" / "a", "plain", steps, began_s=1000.0)
    slower = [(2 * at_s, pid, step) for at_s, pid, step in steps]
    leave_run(tmp_path / "r1" / "b", "deadpool", slower, began_s=2000.0)
    # Killed 0.1 s into step 9; step 8 is lost, step 9 ends 0.9 s after the fault, in another process.
    until_fault = [entry for entry in steps if entry[2] < 9]
    later = [(2.6, 1, 8), (2.6, 3, 8), (3.0, 1, 9), (3.0, 3, 9), (3.2, 1, 10), (3.2, 3, 10)]
    leave_run(tmp_path / "r1" / "c", "dcp_sync1", [*until_fault, *later], began_s=3000.0, kill=9)

    lines = call("analyse.py", str(tmp_path)).splitlines()
    cells = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in lines[2:5]}

    assert cells["plain"][:3] == ["1", "0.250", "-"]
    assert cells["deadpool"][:4] == ["1", "0.500", "2.000", "2.000"]
    assert cells["dcp_sync1"][6:] == ["1", "0.500", "0.900", "0.900", "1/1"]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_short_run_of_plain_and_deadpool_gives_a_table(tmp_path: Path) -> None:
    for configuration, kill in (("plain", "0"), ("deadpool", "8")):
        out = str(tmp_path / "round1" / configuration)
        options = ("--steps", "12", "--kill", kill, "--timeout", "90")
        call("run.py", configuration, out, *options, timeout_s=120, LAYERS="1", SEQ="16")

    lines = call("analyse.py", str(tmp_path)).splitlines()
    row = next(line for line in lines if line.startswith("| deadpool |"))
    phases = next(line for line in lines if line.startswith("- deadpool: "))

    assert row.endswith("| 1/1 |"), "the disturbed run ends with the bits of the undisturbed one"
    order = [phases.index(phase) for phase in ("death seen", "detect", "abort", "agree", "first step")]
    assert order == sorted(order)
    assert any(line.startswith("| deadpool | spare worker |") for line in lines)
