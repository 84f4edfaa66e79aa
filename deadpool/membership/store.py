"""The membership store: the few guarantees of etcd that DeadPool leans on, as one interface.

What an implementation promises:
    - one revision counter for the whole store, +1 at each change; reads are linearizable;
    - a transaction is applied whole or not at all;
    - keys written with a lease disappear when the lease ends, and only then on their own;
    - a watch reports every change under its prefix in order, survives a restart of the server, and says when
      it was cut off.
Every call ends within the deadline of the store, and raises StoreUnavailable when the store cannot be
reached.

What must not be here: anything of the job (that is `registry.py`), and anything of gRPC (that is `etcd.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

LeaseId = int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key as the store holds it."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: LeaseId = 0  # 0: no lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease just granted. The store may grant more than was asked; `granted_ttl_s` is what counts."""

    id: LeaseId
    granted_ttl_s: float


class Operator(Enum):
    """How a comparison compares."""

    EQUAL = "="
    GREATER = ">"


class Target(Enum):
    """What a comparison looks at."""

    CREATE_REVISION = "create"
    MOD_REVISION = "mod"
    VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """One condition of a transaction. Use the functions below; an absent key has revisions 0."""

    key: str
    target: Target
    expected: int | bytes
    operator: Operator = Operator.EQUAL
    whole_prefix: bool = False  # every key that begins with `key` must satisfy it


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One write of a transaction."""

    key: str
    value: bytes
    lease: LeaseId = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRange:
    """Keys from `start` up to, not including, `end`; `end` empty means the one key `start`."""

    start: str
    end: str = ""


def is_absent(key: str) -> Compare:
    """The key does not exist."""
    return Compare(key=key, target=Target.CREATE_REVISION, expected=0)


def is_present(key: str) -> Compare:
    """The key exists."""
    return Compare(key=key, target=Target.CREATE_REVISION, expected=0, operator=Operator.GREATER)


def is_created_at(key: str, revision: int) -> Compare:
    """The key was created at that revision and has existed since."""
    return Compare(key=key, target=Target.CREATE_REVISION, expected=revision)


def is_modified_at(key: str, revision: int) -> Compare:
    """The key was last written at that revision; 0 means it does not exist."""
    return Compare(key=key, target=Target.MOD_REVISION, expected=revision)


def has_value(key: str, value: bytes) -> Compare:
    """The key holds exactly this value."""
    return Compare(key=key, target=Target.VALUE, expected=value)


def is_empty(prefix: str) -> Compare:
    """No key begins with this prefix."""
    return Compare(key=prefix, target=Target.CREATE_REVISION, expected=0, whole_prefix=True)


def prefix_range(prefix: str) -> KeyRange:
    """All keys that begin with `prefix` (which must not be empty; keys are ASCII)."""
    return KeyRange(start=prefix, end=prefix[:-1] + chr(ord(prefix[-1]) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPut:
    """A key was written, or is there at the beginning of a watch."""

    pair: KeyValue


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDeleted:
    """A key was deleted, or its lease ended."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConnected:
    """The watch is live: at its beginning after all existing keys; later before what it missed."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchInterrupted:
    """The watch lost its server and tries to come back. Said once for each interruption."""

    problem: str


WatchEvent = KeyPut | KeyDeleted | WatchConnected | WatchInterrupted
WatchCallback = Callable[[WatchEvent], None]


def changes_between(known: dict[str, int], pairs: Sequence[KeyValue], revision: int) -> list[WatchEvent]:
    """What leads from the keys that a watcher knows to a fresh listing; brings `known` up to date.

    Args:
        known: key -> mod revision, as reported so far; changed in place.
        pairs: the listing.
        revision: the store's revision at the listing.
    """
    listed = {pair.key: pair for pair in pairs}
    changes: list[WatchEvent] = [
        KeyDeleted(key=key, revision=revision) for key in sorted(known) if key not in listed
    ]
    new = [pair for pair in pairs if known.get(pair.key) != pair.mod_revision]
    changes += [KeyPut(pair=pair) for pair in sorted(new, key=lambda pair: pair.mod_revision)]
    known.clear()
    known.update({pair.key: pair.mod_revision for pair in pairs})
    return changes


class Watch(ABC):
    """A running watch."""

    @abstractmethod
    def close(self) -> None:
        """End it. No callback runs after this returns, unless it is called from the callback itself."""


class MembershipStore(ABC):
    """One connection to a membership store; safe to use from several threads."""

    @abstractmethod
    def connect(self) -> None:
        """Reach the store.

        Raises:
            StoreUnavailable: it does not answer; the message names the endpoints and what to check.
        """

    @abstractmethod
    def close(self) -> None:
        """End all watches and connections. Idempotent; joins every thread within a deadline."""

    @abstractmethod
    def get(self, key: str) -> KeyValue | None:
        """Read one key."""

    @abstractmethod
    def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Read all keys under a prefix at one instant, in order of key, and the store's revision then."""

    @abstractmethod
    def put(self, key: str, value: bytes, lease: LeaseId = 0) -> int:
        """Write one key; return the revision of the write.

        Raises:
            LeaseLost: the lease has ended.
        """

    @abstractmethod
    def transaction(
        self,
        compares: Sequence[Compare],
        writes: Sequence[Write] = (),
        deletes: Sequence[KeyRange] = (),
    ) -> int | None:
        """Apply all writes and deletes if all comparisons hold.

        Returns:
            The revision at which it was applied, or None if a comparison failed.

        Raises:
            LeaseLost: a lease of a write has ended.
            StoreUnavailable: as ever; it may then have been applied all the same.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete one key; False if it was not there."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys under a prefix; return how many there were."""

    @abstractmethod
    def lease_grant(self, ttl_s: float) -> Lease:
        """Grant a lease of at least `ttl_s`."""

    @abstractmethod
    def lease_keepalive(self, lease: LeaseId) -> float:
        """Renew a lease; return the seconds it now has, 0 if it has ended."""

    @abstractmethod
    def lease_remaining_s(self, lease: LeaseId) -> float:
        """Seconds left to a lease, perhaps rounded down to whole ones; 0 if it has ended."""

    @abstractmethod
    def lease_revoke(self, lease: LeaseId) -> None:
        """End a lease and delete its keys. Nothing happens if it has already ended."""

    @abstractmethod
    def watch(self, prefix: str, callback: WatchCallback) -> Watch:
        """Report what is under a prefix (in order of writing), then WatchConnected, then every change.

        The callback runs on a thread of the watch, one event at a time; it must be short and must not raise.
        Returns at once, also while the store cannot be reached (WatchInterrupted is then the first event).
        """

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
