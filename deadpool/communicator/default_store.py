"""The default store that user code sees: a part of the current generation's rendezvous.

Its keys do not outlive a recovery: the next generation has another server. It is not on the
communicators' path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

from torch._C._distributed_c10d import Store

from deadpool.errors import CollectiveAborted

T = TypeVar("T")
_PREFIX = "user/"


class StoreOwner(Protocol):
    """Who knows the current store, and the record."""

    def current_store(self) -> Store | None:
        """The store of the generation that is open; None while there is none."""

    def user_call(self, method: str, key: str, call: Callable[[], T]) -> T:
        """Run `call`, or answer it from the record of the constructor phase."""


class DefaultStore(Store):
    """Forwards to the store of the current generation."""

    def __init__(self, owner: StoreOwner) -> None:
        super().__init__()
        self._owner = owner

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, lambda store: store.set(_PREFIX + key, _text(value)))

    def get(self, key: str) -> bytes:
        return self._call("get", key, lambda store: store.get(_PREFIX + key))

    def add(self, key: str, value: int) -> int:
        return self._call("add", key, lambda store: store.add(_PREFIX + key, value))

    def check(self, keys: Sequence[str]) -> bool:
        prefixed = [_PREFIX + key for key in keys]
        return self._call("check", "\n".join(keys), lambda store: store.check(prefixed))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._call(
            "compare_set",
            key,
            lambda store: store.compare_set(_PREFIX + key, _text(expected_value), _text(desired_value)),
        )

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", key, lambda store: store.delete_key(_PREFIX + key))

    def num_keys(self) -> int:
        return self._call("num_keys", "", lambda store: store.num_keys())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        prefixed = [_PREFIX + key for key in keys]
        self._call(
            "wait",
            "\n".join(keys),
            lambda store: store.wait(prefixed) if timeout is None else store.wait(prefixed, timeout),
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: waits have the rendezvous' own deadline."""

    def clone(self) -> DefaultStore:
        return DefaultStore(self._owner)

    def _call(self, method: str, key: str, call: Callable[[Store], T]) -> T:
        def run() -> T:
            store = self._owner.current_store()
            if store is None:
                raise CollectiveAborted(f"store.{method}({key!r}): no generation is open")
            return call(store)

        return self._owner.user_call(method, key, run)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
