"""Slurm's own programs: they are called with a deadline, and may be missing (in a container, say)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from deadpool.errors import DeadPoolError

TOOL_TIMEOUT_S = 120.0  # MessageTimeout is 10 s by default, and up to 100 s on large sites


class SlurmFailed(DeadPoolError):
    """A Slurm command is missing, failed, or did not answer in time."""


class SlurmSilent(SlurmFailed):
    """A Slurm command did not answer in time: slurmctld may carry out what it was asked, all the same."""


def say(text: str) -> None:
    """A line for the operator, into the log of this node or the output of the job."""
    print(f"deadpool: {text}", file=sys.stderr, flush=True)


def call(*command: str, timeout_s: float | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Args:
        command: program and arguments.
        timeout_s: it is killed after this; None: after TOOL_TIMEOUT_S.
        environment: its environment; None: ours.

    Raises:
        SlurmFailed: naming the command and what it said.
        SlurmSilent: it did not end in time.
    """
    shown = " ".join(command)
    timeout_s = TOOL_TIMEOUT_S if timeout_s is None else timeout_s
    if shutil.which(command[0]) is None:
        raise SlurmFailed(f"`{command[0]}` is not on PATH here, so `{shown}` cannot be run")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"`{shown}` did not answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        raise SlurmFailed(f"`{shown}` ended with code {done.returncode}: {said}")
    return done.stdout


def clean_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what Slurm set for this job and step: nested commands would obey it."""
    return {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_"))
    }


def expand(nodes: str) -> tuple[str, ...]:
    """Names in a node list like `n[1-3]`."""
    return tuple(call("scontrol", "show", "hostnames", nodes).split()) if nodes else ()


def fields_of(line: str) -> dict[str, str]:
    """`Key=value` pairs of a line that `scontrol show --oneliner` printed; empty ones are left out."""
    pairs = re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", line)
    return {key: value for key, value in pairs if value not in ("", "(null)", "N/A")}


def show_job(job: str) -> dict[str, str]:
    """What slurmctld says of a job."""
    return fields_of(call("scontrol", "show", "job", "--oneliner", job))


def show_nodes(nodes: Sequence[str]) -> dict[str, dict[str, str]]:
    """What slurmctld says of nodes, by name."""
    text = call("scontrol", "show", "node", "--oneliner", ",".join(nodes))
    found = (fields_of(line) for line in text.splitlines() if line.strip())
    return {each["NodeName"]: each for each in found}
