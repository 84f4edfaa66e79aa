"""What an aborted step leaves behind, as a table: where it is in DeepSpeed, and how it is put back.

An `Entry` names one attribute by its path from the engine. The same path serves three ends: `clear` resets
it, `find_missing` says at the start which attribute a version of DeepSpeed has renamed, and the tests drop
one entry at a time to see that it is needed.

Paths: names joined by dots; `[*]` goes on with every item (values of a mapping, results of a method without
arguments); a path that begins with `deepspeed:` starts at a module instead of the engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One attribute that an aborted step may leave in a state in which no step begins.

    Args:
        path: of the attribute; see the module.
        reset: called with the object that holds it and its name.
        is_lazy: the attribute appears in the first forward only; an object without it has nothing to reset.
    """

    path: str
    reset: Callable[[Any, str], None]
    is_lazy: bool = False


def becomes(path: str, value: object, *, is_lazy: bool = False) -> Entry:
    """An attribute that is set to an immutable value."""
    return Entry(path, lambda owner, name: setattr(owner, name, value), is_lazy)


def emptied(path: str, *, is_lazy: bool = False) -> Entry:
    """A container that others hold, too: it is cleared, not replaced."""
    return Entry(path, lambda owner, name: getattr(owner, name).clear(), is_lazy)


def called(path: str) -> Entry:
    """A method of DeepSpeed that resets more than one attribute."""
    return Entry(path, lambda owner, name: getattr(owner, name)())


def clear(engine: Any, entries: Iterable[Entry]) -> None:
    """Reset every entry. Neither issues a collective nor waits for one."""
    for entry in entries:
        for owner, name in holders(engine, entry.path):
            if not entry.is_lazy or _has(owner, name):
                entry.reset(owner, name)


def find_missing(engine: Any, entries: Iterable[Entry]) -> list[str]:
    """The paths that lead nowhere in this version of DeepSpeed."""
    return [entry.path for entry in entries if not _exists(engine, entry)]


def holders(engine: Any, path: str) -> Iterator[tuple[Any, str]]:
    """The objects that hold the last attribute of `path`, and its name."""
    root, _, rest = path.rpartition(":")
    start = importlib.import_module(root) if root else engine
    *way, name = rest.split(".")
    owners = [start]
    for part in way:
        attribute, *nested = part.split("[*]")
        owners = [getattr(owner, attribute) for owner in owners]
        for _ in nested:
            owners = [item for owner in owners for item in _items(owner)]
    return ((owner, name) for owner in owners)


def _items(container: Any) -> Iterable[Any]:
    if callable(container):
        container = container()
    return container.values() if isinstance(container, Mapping) else container


def _exists(engine: Any, entry: Entry) -> bool:
    try:
        return entry.is_lazy or all(hasattr(owner, name) for owner, name in holders(engine, entry.path))
    except (AttributeError, ImportError):
        return False


def _has(owner: Any, name: str) -> bool:
    # Not hasattr: a wrapper module may answer with the attribute of the module that it wraps.
    return name in vars(owner)
