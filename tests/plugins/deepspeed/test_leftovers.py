"""What an aborted step leaves behind is reset, and no more than that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from deadpool.errors import IntegrationError
from deadpool.plugins.deepspeed.engine import EngineAdapter
from deadpool.plugins.deepspeed.leftovers import Entry
from deadpool.snapshot.stateful import collect
from tests.plugins.deepspeed.attributes import differences, flatten
from tests.plugins.deepspeed.engines import Kind, Trainer, trainer
from tests.unit.snapshot.support import Keeper, digest, keeping

WARM = 3
"""Steps before the aborted one: ZeRO-3 records in the first and second, and prefetches from the third on."""

KINDS = [
    Kind(stage=0, dtype="fp32"),
    Kind(stage=0, dtype="bf16"),
    Kind(stage=1, accumulate=2),
    Kind(stage=1, accumulate=2, gradients="fp32"),
    Kind(stage=2, accumulate=2),
    Kind(stage=2, dtype="fp32", overlap=False, bucket=300),  # some parameters are larger
    Kind(stage=2, is_contiguous=False, is_manual=True),
    Kind(stage=1, dtype="fp32", gradients="bf16", accumulate=2),
    Kind(stage=3, accumulate=2),
    Kind(stage=1, accumulate=2, stages=2),
]


class Drill:
    """Steps that are aborted at a given collective, and tried again from a snapshot."""

    def __init__(self, own: Trainer, keeper: Keeper) -> None:
        self.own, self.keeper = own, keeper
        (_, adapter), *_ = own.state.adapters
        assert isinstance(adapter, EngineAdapter)
        self.adapter = adapter
        self.all: Sequence[Entry] = adapter.leftovers
        self.blob = keeper.take(0)
        self.expected = self.train()
        own.script.restart()
        own.step(WARM)
        self.collectives = list(own.script.calls)
        self.go_back()
        self.idle = flatten(own.engine)  # after steps that nothing disturbed

    def go_back(self) -> None:
        self.keeper.go_back(self.blob)

    def train(self) -> tuple[list[float], str]:
        losses = [self.own.step(number) for number in range(WARM)]
        return losses, digest(self.own.state)

    def abort(self, call: int) -> None:
        """Stand at the snapshot, train, and be aborted before the n-th collective of a step."""
        self.go_back()
        self.train()
        self.own.script.restart(fail_at=call)
        with pytest.raises(Exception, match="was aborted"):
            self.own.step(WARM)
        self.own.script.restart()

    def is_as_good_as_new(self) -> list[str]:
        """What differs from an engine that was never aborted: attributes, or else results."""
        found = differences(self.idle, flatten(self.own.engine))
        if found:
            return found
        try:
            return [] if self.train() == self.expected else ["the results of the next steps"]
        except Exception as error:
            return [f"the next step raises {error!r}"]


def points(collectives: Sequence[str]) -> list[int]:
    """The first, second and last call of every run of one operation, counted from 1."""
    runs: list[list[int]] = []
    for index, operation in enumerate(collectives):
        if not runs or collectives[runs[-1][-1] - 1] != operation:
            runs.append([])
        runs[-1].append(index + 1)
    return sorted({call for run in runs for call in (*run[:2], run[-1])})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_that_was_aborted_at_a_collective_leaves_no_trace(kind: Kind) -> None:
    with trainer(kind) as own, keeping(own.state) as keeper:
        drill = Drill(own, keeper)
        for call in points(drill.collectives):
            drill.abort(call)
            drill.go_back()
            left = "\n".join(drill.is_as_good_as_new())
            assert not left, f"aborted before call {call} of {drill.collectives}:\n{left}"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_entry_is_needed_by_some_engine() -> None:
    """Without the entry some aborted step shows: in an attribute, in the bits, or as an error."""
    needed: dict[str, str] = {}
    known: set[str] = set()
    for kind in KINDS:
        with trainer(kind) as own, keeping(own.state) as keeper:
            drill = Drill(own, keeper)
            known |= {entry.path for entry in drill.all}
            for entry in drill.all:
                if entry.path not in needed:
                    shown = find_need(drill, entry)
                    print(f"{entry.path}: {kind}: {shown or 'not needed'}", flush=True)
                    if shown:
                        needed[entry.path] = shown
    assert known - needed.keys() == set()


def find_need(drill: Drill, entry: Entry) -> str:
    """How the absence of `entry` shows, or an empty text."""
    for call in points(drill.collectives):
        drill.abort(call)
        drill.adapter.leftovers = tuple(other for other in drill.all if other is not entry)
        shown = ""
        try:
            drill.go_back()
        except Exception as error:
            shown = f"the reset raises {error!r}"
        drill.adapter.leftovers = tuple(drill.all)
        shown = shown or ", ".join(drill.is_as_good_as_new()[:3])
        if shown:
            return f"call {call} ({drill.collectives[call - 1]}): {shown}"
    return ""


def test_an_attribute_that_a_version_has_renamed_is_named_at_the_start() -> None:
    with trainer(Kind(stage=2)) as own:
        optimizer: Any = own.engine.optimizer
        optimizer.buckets_by_type = optimizer.__dict__.pop("ipg_buckets")
        del optimizer.params_already_reduced
        with pytest.raises(IntegrationError) as refusal:
            collect({"engine": own.engine})
        assert "no optimizer.ipg_buckets[*].clear, optimizer.params_already_reduced;" in str(refusal.value)


@pytest.mark.parametrize(
    "kind", [Kind(stage=0), Kind(stage=1), Kind(stage=3), Kind(stage=0, stages=2)], ids=str
)
def test_a_reset_of_an_idle_engine_changes_no_result(kind: Kind) -> None:
    with trainer(kind) as own:
        undisturbed = [own.step(number) for number in range(4)]
    with trainer(kind) as own:
        (_, adapter), *_ = own.state.adapters
        losses = []
        for number in range(4):
            adapter.reset()
            losses.append(own.step(number))
    assert losses == undisturbed
