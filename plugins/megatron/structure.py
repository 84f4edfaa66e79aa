"""Caches that decide which collectives a rank calls. They must travel to a spare.

A spare that lacks one repeats what its peers remember, alone: all hang. Each is read at a boundary as what
the next iteration would make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deadpool.plugins.megatron.objects import MegatronObjects


@dataclass(frozen=True, slots=True)
class Cache:
    """One kind of cache: `read` gives plain values, `restore` takes them."""

    name: str
    read: Callable[[MegatronObjects], list[Any]]
    restore: Callable[[MegatronObjects, Sequence[Any]], None]


def read_ready_counts(objects: MegatronObjects) -> list[Any]:
    """Per bucket group: how often each gradient becomes ready in an iteration; None before that is known.

    Once known, a reduction is dispatched from inside the backward; before, at its end.
    """
    found: list[Any] = []
    for group in objects.bucket_groups():
        # The first iteration's counts become the known ones only as the next one begins.
        is_due = group.is_first_batch and group.per_param_grad_ready_counts
        counts = group.per_param_grad_ready_counts if is_due else group.golden_per_param_grad_ready_counts
        is_known = is_due or not group.is_first_batch
        found.append([counts.get(param, 0) for param in _params(group)] if is_known else None)
    return found


def restore_ready_counts(objects: MegatronObjects, stored: Sequence[Any]) -> None:
    """The inverse of `read_ready_counts`."""
    for group, counts in zip(objects.bucket_groups(), stored, strict=True):
        group.is_first_batch = counts is None
        group.golden_per_param_grad_ready_counts = (
            {param: count for param, count in zip(_params(group), counts, strict=True) if count}
            if counts is not None
            else {}
        )


def read_optimizer_caches(objects: MegatronObjects) -> list[Any]:
    """Answers of collectives that an optimizer remembers, by attribute; what is not set is left out."""
    return [
        {name: vars(part)[name] for name in objects.internals.optimizer_caches if name in vars(part)}
        for part in _all_parts(objects)
    ]


def restore_optimizer_caches(objects: MegatronObjects, stored: Sequence[Any]) -> None:
    """The inverse of `read_optimizer_caches`: what was not set is not set afterwards."""
    for part, values in zip(_all_parts(objects), stored, strict=True):
        for name in objects.internals.optimizer_caches:
            vars(part).pop(name, None)
        vars(part).update(values)


CACHES = (
    Cache("ready_counts", read_ready_counts, restore_ready_counts),
    Cache("optimizer_caches", read_optimizer_caches, restore_optimizer_caches),
)


def read_caches(objects: MegatronObjects) -> dict[str, list[Any]]:
    """All caches as plain values, by name."""
    return {cache.name: cache.read(objects) for cache in CACHES}


def restore_caches(objects: MegatronObjects, stored: dict[str, list[Any]]) -> None:
    """The inverse of `read_caches`."""
    for cache in CACHES:
        cache.restore(objects, stored[cache.name])


def _params(group: Any) -> list[Any]:
    return [param for bucket in group.buckets for param in bucket.params_list]


def _all_parts(objects: MegatronObjects) -> list[Any]:
    """The given optimizer and what it chains: either may remember something."""
    chained = list(getattr(objects.optimizer, "chained_optimizers", ()))
    return [objects.optimizer, *(part for part in chained if part is not objects.optimizer)]
