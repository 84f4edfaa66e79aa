"""Between the values of `store.py` and etcd's messages."""

from __future__ import annotations

from typing import Any, assert_never

from deadpool.membership._rpc import etcdrpc
from deadpool.membership.store import Compare, KeyRange, KeyValue, Operator, Target, Write, prefix_range


def to_pair(pair: Any) -> KeyValue:
    """One key from etcd."""
    return KeyValue(
        key=pair.key.decode(),
        value=bytes(pair.value),
        create_revision=int(pair.create_revision),
        mod_revision=int(pair.mod_revision),
        lease=int(pair.lease),
    )


def to_range_request(keys: KeyRange) -> Any:
    """Read these keys."""
    return etcdrpc.RangeRequest(key=keys.start.encode(), range_end=keys.end.encode())


def to_delete_request(keys: KeyRange) -> Any:
    """Delete these keys."""
    return etcdrpc.DeleteRangeRequest(key=keys.start.encode(), range_end=keys.end.encode())


def to_put_request(write: Write) -> Any:
    """Write this key."""
    return etcdrpc.PutRequest(key=write.key.encode(), value=write.value, lease=write.lease)


def to_compare(compare: Compare) -> Any:
    """One condition of a transaction."""
    made = etcdrpc.Compare(
        key=compare.key.encode(),
        result=etcdrpc.Compare.EQUAL if compare.operator is Operator.EQUAL else etcdrpc.Compare.GREATER,
        range_end=prefix_range(compare.key).end.encode() if compare.whole_prefix else b"",
    )
    match compare.target:
        case Target.CREATE_REVISION:
            made.target, made.create_revision = etcdrpc.Compare.CREATE, compare.expected
        case Target.MOD_REVISION:
            made.target, made.mod_revision = etcdrpc.Compare.MOD, compare.expected
        case Target.VALUE:
            made.target, made.value = etcdrpc.Compare.VALUE, compare.expected
        case _:
            assert_never(compare.target)
    return made
