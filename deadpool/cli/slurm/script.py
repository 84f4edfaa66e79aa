"""What a batch script asks Slurm for in its `#SBATCH` lines."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# `B:` tells the batch script alone, `R:` is about reservations.
_SIGNAL = re.compile(r"(?:^|\s)--signal[=\s](?P<who>[BR]{0,2}:)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")
_DEFAULT_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """What the agents get ahead of the time limit."""

    name: str  # TERM, USR1, ...
    seconds: int  # before the end; Slurm may be up to a minute early


def options_of(script: str) -> str:
    """All options of a batch script, on one line. Slurm stops reading at the first command."""
    head = re.split(r"^\s*[^#\s]", script, maxsplit=1, flags=re.MULTILINE)[0]
    return " ".join(re.findall(r"^#SBATCH\s+([^#\n]*)", head, re.MULTILINE)).strip()


def warning_of(script: str) -> Warned | None:
    """How a script lets Slurm warn the agents; None if it does not."""
    found = _SIGNAL.search(options_of(script))
    if found is None or "B" in (found["who"] or ""):
        return None
    name = found["name"].upper().removeprefix("SIG")
    if name.isdecimal() and int(name) in set(signal.Signals):
        name = signal.Signals(int(name)).name.removeprefix("SIG")
    return Warned(name=name, seconds=int(found["seconds"] or _DEFAULT_SECONDS))


def find_fault(warned: Warned, expected: str, grace_s: float) -> str:
    """Why nothing would be saved after this warning, and what to change; "" if it would.

    Args:
        warned: what the script lets Slurm send.
        expected: `--warning-signal`; the hosts take TERM as a warning, too.
        grace_s: `--grace-s`, the time in which the newest step is written.
    """
    if warned.name not in ("TERM", expected):
        return (
            f"`#SBATCH --signal` sends {warned.name}, which would end the agents with nothing saved, as they "
            f"wait for {expected}: give --warning-signal {warned.name}, or let Slurm send {expected}"
        )
    if warned.seconds < grace_s:
        return (
            f"`#SBATCH --signal` comes {warned.seconds} s before the end, and --grace-s lets the newest step "
            f"take {grace_s:g} s: let it come earlier, and half a minute more, for the next submission"
        )
    return ""
