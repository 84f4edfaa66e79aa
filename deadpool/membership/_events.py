"""From what the store holds and reports to the records of a job and the events of its watch."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from deadpool.core.types import Ack, Fault, Member, View
from deadpool.errors import MembershipError
from deadpool.membership.records import (
    AckPut,
    FaultPut,
    Finished,
    FinishedPut,
    Leader,
    LeaderGone,
    LeaderPut,
    MemberGone,
    MemberPut,
    Quarantine,
    QuarantineGone,
    QuarantinePut,
    RegistryEvent,
    StoreLost,
    StoreReached,
    ViewGone,
    ViewPut,
)
from deadpool.membership.store import (
    KeyDeleted,
    KeyPut,
    KeyValue,
    WatchConnected,
    WatchEvent,
    WatchInterrupted,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def to_registry_event(event: WatchEvent, prefix: str) -> RegistryEvent | None:
    """What a watch of the store under `prefix`, the job's, says of the job; None if that is nothing."""
    match event:
        case KeyPut(pair=pair):
            return _from_put(pair, prefix)
        case KeyDeleted(key=key):
            return _from_delete(key, prefix)
        case WatchConnected(revision=revision):
            return StoreReached(revision=revision)
        case WatchInterrupted(problem=problem):
            return StoreLost(problem=problem)


def _from_put(pair: KeyValue, prefix: str) -> RegistryEvent | None:
    folder, _, _ = pair.key.removeprefix(prefix).partition("/")
    match folder:
        case "members":
            member = decode_or_warn(pair, Member)
            return MemberPut(member=member, lease=pair.lease) if member else None
        case "leader":
            leader = decode_or_warn(pair, Leader)
            return LeaderPut(member_id=leader.member, term=pair.create_revision) if leader else None
        case "view":
            view = decode_or_warn(pair, View)
            return ViewPut(view=view, revision=pair.mod_revision) if view else None
        case "acks":
            ack = decode_or_warn(pair, Ack)
            return AckPut(ack=ack) if ack else None
        case "faults":
            fault = decode_or_warn(pair, Fault)
            return FaultPut(fault=fault) if fault else None
        case "finished":
            finished = decode_or_warn(pair, Finished)
            return (
                FinishedPut(member_id=finished.member, generation=finished.generation) if finished else None
            )
        case "quarantine":
            quarantine = decode_or_warn(pair, Quarantine)
            return QuarantinePut(quarantine=quarantine) if quarantine else None
        case _:
            return None  # job and recoveries are read when they are needed


def _from_delete(key: str, prefix: str) -> RegistryEvent | None:
    folder, _, rest = key.removeprefix(prefix).partition("/")
    match folder:
        case "members":
            return MemberGone(member_id=rest)
        case "leader":
            return LeaderGone()
        case "view":
            return ViewGone()
        case "quarantine":
            return QuarantineGone(host=rest)
        case _:
            return None  # cleaned up


def decode_record(pair: KeyValue, kind: type[_T]) -> _T:
    """Decode one record.

    Raises:
        MembershipError: it has another form, as written by another version.
    """
    try:
        return msgspec.json.decode(pair.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MembershipError(f"the record {pair.key} cannot be read as {kind.__name__}: {error}") from error


def decode_or_warn(pair: KeyValue, kind: type[_T]) -> _T | None:
    """Decode one record; None, and a line in the log, if it has another form."""
    try:
        return decode_record(pair, kind)
    except MembershipError as error:
        _log.warning("%s; it is left out (do all hosts run the same version of DeadPool?)", error)
        return None
