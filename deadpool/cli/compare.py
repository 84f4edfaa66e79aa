"""Two run folders, bit for bit: recorded values per step, raw state of every tensor and part of the blob.

Of a step that ran twice the newest generation counts; a step that was aborted left no values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from deadpool.cli.rundir import RankDigests, read_digests


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Difference:
    """The first thing that is not as it was undisturbed, for one rank and step."""

    step: int
    rank: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a comparison found; equal runs have no differences."""

    differences: tuple[Difference, ...]  # by step, then rank
    has_records: bool  # False: the script recorded nothing, so only the state was compared
    ranks: int


Record = tuple[str, str, str, str]  # name, dtype, shape, hexadecimal bytes


def compare_runs(undisturbed: Path, disturbed: Path, world_size: int) -> Comparison:
    """Compare everything that two runs left behind.

    Args:
        undisturbed: run folder of the run without injections.
        disturbed: run folder of the other one.
        world_size: ranks that both must have.
    """
    differences: list[Difference] = []
    before, after = read_digests(undisturbed), read_digests(disturbed)
    has_records = False
    for rank in range(world_size):
        records = read_records(undisturbed, rank), read_records(disturbed, rank)
        has_records = has_records or any(records)
        differences.extend(compare_records(rank, *records))
        differences.extend(_compare_digests(rank, before.get(rank), after.get(rank)))
    return Comparison(differences=tuple(sorted(differences)), has_records=has_records, ranks=world_size)


def read_records(run_dir: Path, rank: int) -> dict[int, list[Record]]:
    """Values that a rank recorded: step -> values in order, of the newest generation that ran the step."""
    try:
        text = (run_dir / "records" / f"rank-{rank}.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    by_step: dict[int, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for line in text.split("\n"):
        # A killed writer may leave half a line, and the next one appends to it; the half does not count.
        try:
            value = json.loads(line[max(0, line.rfind('{"g":')) :])
            record = (str(value["n"]), str(value["d"]), str(value["sh"]), str(value["b"]))
            by_step[int(value["s"])][int(value["g"])].append(record)
        except (ValueError, KeyError, TypeError):
            continue
    return {step: generations[max(generations)] for step, generations in sorted(by_step.items())}


def compare_records(
    rank: int, before: dict[int, list[Record]], after: dict[int, list[Record]]
) -> list[Difference]:
    """Differences of one rank's recorded values, at most one a step."""
    found = []
    for step in sorted(before.keys() | after.keys()):
        left, right = before.get(step, []), after.get(step, [])
        if left == right:
            continue
        what = next(
            (_name_difference(one, other) for one, other in zip(left, right, strict=False) if one != other),
            f"{len(right)} recorded values instead of {len(left)}",
        )
        found.append(Difference(rank=rank, step=step, what=what))
    return found


def _name_difference(before: Record, after: Record) -> str:
    if before[0] != after[0]:
        return f"recorded {after[0]!r} where {before[0]!r} was recorded"
    for index, what in ((1, "dtype"), (2, "shape")):
        if before[index] != after[index]:
            return f"record {before[0]!r}: {what} {after[index]} instead of {before[index]}"
    return f"record {before[0]!r}: {_count_bits(before[3], after[3])}"


def _count_bits(before: str, after: str) -> str:
    try:
        left, right = bytes.fromhex(before), bytes.fromhex(after)
    except ValueError:
        return "bytes that are no hexadecimal number"
    if len(left) != len(right):
        return f"{len(right)} bytes instead of {len(left)}"
    bits = (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).bit_count()
    return f"{bits} of {8 * len(left)} bits differ"


def _compare_digests(rank: int, before: RankDigests | None, after: RankDigests | None) -> list[Difference]:
    if before is None or after is None:
        which = "undisturbed" if before is None else "disturbed"
        return [Difference(rank=rank, step=0, what=f"no final state of this rank in the {which} run")]
    if before.steps != after.steps:
        what = f"the run ended at step {after.steps} instead of {before.steps}"
        return [Difference(rank=rank, step=min(before.steps, after.steps), what=what)]
    found = []
    for kind, left, right in (("tensor", before.final, after.final), ("blob", before.blob, after.blob)):
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) == right.get(name):
                continue
            how = "differs" if name in left and name in right else "is missing"
            if name not in left:
                how = "is new"
            found.append(
                Difference(rank=rank, step=after.steps, what=f"{kind} {name!r} of the final state {how}")
            )
    return found
