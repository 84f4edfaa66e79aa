"""What an aborted step leaves behind is reset, and no more than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deadpool.errors import IntegrationError
from deadpool.plugins.deepspeed.engine import EngineAdapter
from deadpool.plugins.deepspeed.leftovers import Entry, holders
from deadpool.snapshot.stateful import collect
from tests.plugins.deepspeed.attributes import differences, flatten
from tests.plugins.deepspeed.engines import Kind, Trainer, cases, trainer
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
    Kind(stage=3, is_checkpointed=True),
]


class Drill:
    """Steps that are aborted at a given collective, and tried again from a snapshot."""

    def __init__(self, own: Trainer, keeper: Keeper) -> None:
        self.own, self.keeper = own, keeper
        (_, adapter), *_ = own.state.adapters
        assert isinstance(adapter, EngineAdapter)
        self.adapter = adapter
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


@pytest.mark.timeout(300)  # every collective of a step is one abort and seven steps
@pytest.mark.parametrize("kind", cases(KINDS, 1, 2, 3, 4, 8, 9))
def test_a_step_that_was_aborted_at_a_collective_leaves_no_trace(kind: Kind) -> None:
    with trainer(kind) as own, keeping(own.state) as keeper:
        drill = Drill(own, keeper)
        for call in points(drill.collectives):
            drill.abort(call)
            drill.go_back()
            left = "\n".join(drill.is_as_good_as_new())
            assert not left, f"aborted before call {call} of {drill.collectives}:\n{left}"


def find_unneeded(kinds: Sequence[Kind], only: Callable[[EngineAdapter], Sequence[Entry]]) -> list[str]:
    """Paths of entries whose absence shows in none of the engines: no attribute, no bit, no error."""
    unneeded: dict[str, Entry] = {}
    shown: set[str] = set()
    for kind in kinds:
        with trainer(kind) as own, keeping(own.state) as keeper:
            drill = Drill(own, keeper)
            for entry in only(drill.adapter):
                if entry.path not in shown:
                    how = find_need(drill, entry)
                    print(f"{entry.path}: {kind}: {how or 'not shown'}", flush=True)
                    if how:
                        shown.add(entry.path)
                        unneeded.pop(entry.path, None)
                    else:
                        unneeded[entry.path] = entry
    return list(unneeded)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kinds",
    [
        [kind for kind in KINDS if kind.stages == 1 and kind.stage in (1, 2) and kind.gradients != "fp32"],
        [kind for kind in KINDS if kind.gradients == "fp32"],
        [kind for kind in KINDS if kind.stage == 3],
    ],
    ids=["stages 1 and 2", "bf16 with fp32 gradients", "stage 3"],
)
def test_every_entry_of_an_optimizer_is_needed(kinds: list[Kind]) -> None:
    assert find_unneeded(kinds, lambda adapter: adapter.of_optimizer) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_entry_of_the_engine_is_needed() -> None:
    kinds = [kind for kind in KINDS if kind.stage == 0 or kind.is_manual or kind.stages > 1]
    assert find_unneeded(kinds, lambda adapter: adapter.of_engine) == []


def find_need(drill: Drill, entry: Entry) -> str:
    """How the absence of `entry` shows, or an empty text."""
    every_call = range(1, len(drill.collectives) + 1)
    adapter = drill.adapter
    everything = (adapter.of_engine, adapter.of_optimizer)
    for call in every_call if drill.own.kind.is_checkpointed else points(drill.collectives):
        drill.abort(call)
        adapter.of_engine, adapter.of_optimizer = (
            tuple(other for other in entries if other is not entry) for entries in everything
        )
        shown = ""
        try:
            drill.go_back()
        except Exception as error:
            shown = f"the reset raises {error!r}"
        adapter.of_engine, adapter.of_optimizer = everything
        shown = shown or ", ".join(drill.is_as_good_as_new()[:3])
        if shown:
            return f"call {call} ({drill.collectives[call - 1]}): {shown}"
    return ""


WALKED = [
    Kind(stage=0),
    Kind(stage=1, gradients="fp32"),
    Kind(stage=2),
    Kind(stage=3),
    Kind(stage=1, stages=2),
]


def test_every_private_attribute_of_the_list_exists_in_this_version() -> None:
    paths: set[str] = set()
    walked: set[str] = set()
    for kind in WALKED:
        with trainer(kind) as own:
            (_, adapter), *_ = own.state.adapters
            own.step(0)
            assert isinstance(adapter, EngineAdapter)
            for entry in (*adapter.of_engine, *adapter.of_optimizer):
                paths.add(entry.path)
                found = [hasattr(owner, attribute) for owner, attribute in holders(own.engine, entry.path)]
                assert entry.is_lazy or all(found), entry.path
                if any(found):
                    walked.add(entry.path)
    assert paths == walked


def test_an_attribute_that_a_version_has_renamed_is_named_at_the_start() -> None:
    with trainer(Kind(stage=2)) as own:
        optimizer: Any = own.engine.optimizer
        optimizer.buckets_by_type = optimizer.__dict__.pop("ipg_buckets")
        del optimizer.params_already_reduced
        with pytest.raises(IntegrationError) as refusal:
            collect({"engine": own.engine})
        assert "no optimizer.ipg_buckets[*].clear, optimizer.ipg_buckets[*].index, " in str(refusal.value)


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
