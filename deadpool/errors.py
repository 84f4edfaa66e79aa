"""The errors that scripts and callers may see, and every exit code.

    DeadPoolError
    |- ConfigError            bad input; lists every problem found, each with its origin       exit 2
    |- IntegrationError       unsupported version or object, naming it and the remedy          exit 2
    |- MembershipError
    |  |- StoreUnavailable    etcd cannot be reached                                           exit 5
    |  |- LeaseLost           this agent's lease ran out
    |  `- Fenced              this process was replaced and must write nothing                 exit 73
    |- DeviceLost             the accelerator hangs or has a sticky error: this worker is lost
    |- CommunicatorError
    |  |- CollectiveAborted   the generation was closed; caught by `wrap`
    |  |- RebuildTimeout      communicators were not rebuilt in time
    |  `- ReplayMismatch      a spare's constructor phase differs from the recorded one
    `- SnapshotError
       |- LayoutMismatch      a snapshot does not fit the state it should restore              exit 2
       `- ReplicaCorrupt      a copy failed its checksum; it does not count

A message says what happened, where (rank, generation, step) and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Documented exit codes (docs/exit-codes.md)."""

    FINISHED = 0
    USER_ERROR = 1
    BAD_INPUT = 2
    NO_SPARE_LEFT = 3
    STATE_LOST = 4
    CONTROL_PLANE_UNREACHABLE = 5
    REPLACED = 73
    INTERRUPTED = 130
    TERMINATED = 143


class DeadPoolError(Exception):
    """Base of all errors of DeadPool."""


class ConfigError(DeadPoolError):
    """Bad input. `problems` lists every one found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class IntegrationError(DeadPoolError):
    """An object or version that DeadPool does not support."""


class DeviceLost(DeadPoolError):
    """The accelerator hangs or has a sticky error; this process can do nothing with it any more."""


class MembershipError(DeadPoolError):
    """Base of membership errors."""


class StoreUnavailable(MembershipError):
    """The membership store cannot be reached."""


class LeaseLost(MembershipError):
    """This agent's lease ran out."""


class Fenced(MembershipError):
    """This process was replaced; it must write nothing and end."""


class CommunicatorError(DeadPoolError):
    """Base of communicator errors."""


class CollectiveAborted(CommunicatorError):
    """The generation was closed while, or before, a collective ran. `wrap` catches it."""


class RebuildTimeout(CommunicatorError):
    """The communicators of a generation were not built in time.

    `missing` has the ranks that did not come; () if that is not known.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class ReplayMismatch(CommunicatorError):
    """A spare's constructor phase made a call that differs from the record."""


class SnapshotError(DeadPoolError):
    """Base of snapshot errors."""


class LayoutMismatch(SnapshotError):
    """A snapshot does not fit the state it should restore."""


class ReplicaCorrupt(SnapshotError):
    """A copy failed its checksum."""
