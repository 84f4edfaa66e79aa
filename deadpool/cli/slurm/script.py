"""What a batch script asks Slurm for in its `#SBATCH` lines."""

from __future__ import annotations

import re
import signal

# `B:` tells the batch script alone, `R:` is about reservations.
_SIGNAL = re.compile(r"(?:^|\s)--signal[=\s](?P<who>[BR]{0,2}:)?(?P<name>\w+)")


def options_of(script: str) -> str:
    """All options of a batch script, on one line. Slurm stops reading at the first command."""
    head = re.split(r"^\s*[^#\s]", script, maxsplit=1, flags=re.MULTILINE)[0]
    return " ".join(re.findall(r"^#SBATCH\s+([^#\n]*)", head, re.MULTILINE)).strip()


def warning_of(script: str) -> str | None:
    """The signal that the agents get ahead of the time limit, as `TERM`; None if they get none."""
    found = _SIGNAL.search(options_of(script))
    if found is None or "B" in (found["who"] or ""):
        return None
    name = found["name"].upper().removeprefix("SIG")
    if not name.isdecimal():
        return name
    try:
        return signal.Signals(int(name)).name.removeprefix("SIG")
    except ValueError:
        return name


def handles(warning_signal: str, sent: str) -> bool:
    """Whether the hosts take `sent` as a warning: TERM always, else the one that they were told."""
    return sent in ("TERM", warning_signal)
