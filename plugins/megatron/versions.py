"""Which megatron-core this adaptor was read against, and where the versions differ.

Attributes that DeadPool reads or resets are internals of megatron-core. Another version may have other ones,
so it is refused by name instead of tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

from deadpool.errors import IntegrationError

PACKAGE = "megatron-core"
Version = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Internals:
    """What differs between the versions of one range."""

    first: Version
    last: Version
    # Flags of a bucket group beyond those of every version, and their value between two iterations.
    bucket_group_flags: tuple[tuple[str, Any], ...] = ()
    # Attributes of an optimizer that remember an answer of a collective: a spare that lacks one asks alone.
    optimizer_caches: tuple[str, ...] = ()


_RANGES = (
    Internals(first=(0, 16), last=(0, 16)),
    Internals(
        first=(0, 17),
        last=(0, 19),
        bucket_group_flags=(("grad_reduce_finished", False),),
        optimizer_caches=("_has_grad_norm_group_cache",),
    ),
)


def check_installed() -> None:
    """Refuse a missing or unknown megatron-core.

    Raises:
        IntegrationError: names the version found and the range that is supported.
    """
    internals_for(installed_version())


def installed_version() -> str:
    """Version of the installed megatron-core.

    Raises:
        IntegrationError: there is none.
    """
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise IntegrationError(
            f"{PACKAGE} is not installed; install it with: pip install 'deadpool[megatron]'"
        ) from error


def internals_for(version: str) -> Internals:
    """The internals of a version of megatron-core.

    Raises:
        IntegrationError: no range has it.
    """
    numbers = version.split(".")
    if len(numbers) > 1 and numbers[0].isdigit() and numbers[1].isdigit():
        wanted = (int(numbers[0]), int(numbers[1]))
        for candidate in _RANGES:
            if candidate.first <= wanted <= candidate.last:
                return candidate
    first, last = _RANGES[0].first, _RANGES[-1].last
    raise IntegrationError(
        f"{PACKAGE} {version} is not supported: DeadPool knows {first[0]}.{first[1]} to {last[0]}.{last[1]}, "
        "and resets internals that other versions may not have; install one of these"
    )


def installed_internals() -> Internals:
    """Internals of the installed megatron-core; raises as `internals_for` does."""
    return internals_for(installed_version())
