"""Runs `deadpool verify` as a user does, and keeps what it printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
YES = "bit-identical to the undisturbed run: yes"
NO = "bit-identical to the undisturbed run: no: "


def verify(*arguments: str, limit_s: float = 170.0) -> tuple[int, list[str]]:
    """Exit code and lines of `deadpool verify --standalone ARGUMENTS`, run from the root of the tree."""
    done = subprocess.run(
        [sys.executable, "-m", "deadpool", "verify", "--standalone", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        text=True,
    )
    return done.returncode, done.stdout.strip().splitlines()


def check_verified(*arguments: str, limit_s: float = 170.0) -> None:
    """Fail unless `deadpool verify` says yes."""
    code, lines = verify(*arguments, limit_s=limit_s)
    assert lines[-1] == YES, "\n".join(lines[-60:])
    assert code == 0


def check_script(
    script: str,
    folder: Path,
    nnodes: int,
    inject: str,
    *options: str,
    spares: int = 1,
    limit_s: float = 150.0,
) -> None:
    """Fail unless `script` with faults is bit-identical to itself without.

    Args:
        script: with `options`, from the root of the tree.
        folder: of the runs.
        nnodes: active hosts.
        inject: faults, separated by spaces.
        spares: further hosts.
        limit_s: what the two runs may take.
    """
    injections = [word for fault in inject.split() for word in ("--inject", fault)]
    hosts = ["--nnodes", str(nnodes), "--spares", str(spares), "--run-dir", str(folder)]
    check_verified(*hosts, *injections, script, *options, limit_s=limit_s)
