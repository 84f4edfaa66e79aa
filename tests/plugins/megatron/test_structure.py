"""Caches that decide which collectives a rank calls travel to a spare: without one it calls others."""

from __future__ import annotations

import pytest

from tests.plugins.megatron.drill import MakeDrill, outcome
from tests.unit.snapshot.support import keeping

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

OVERLAP = ("--overlap", "--dtype", "bf16")


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_spare_without_the_counts_of_ready_gradients_calls_other_collectives(
    make_drill: MakeDrill, monkeypatch: pytest.MonkeyPatch, is_restored: bool
) -> None:
    from deadpool.plugins.megatron import structure

    drill = make_drill(*OVERLAP)
    with keeping(drill.collect()) as keeper:
        drill.steps(3)
        blob = keeper.take(3)
        keeper.drain()
        keeper.go_back(blob)
        _, _, expected, _ = outcome(drill)

        spare = make_drill(*OVERLAP)
        if not is_restored:
            monkeypatch.setattr(structure, "CACHES", structure.CACHES[1:])
            monkeypatch.setattr(structure, "restore_caches", lambda objects, stored: None)
            monkeypatch.setattr("deadpool.plugins.megatron.adapter.restore_caches", lambda *_: None)
        with keeping(spare.collect()) as theirs:
            theirs.banks = keeper.banks
            theirs.go_back(blob)
            _, _, found, _ = outcome(spare)
    assert (found == expected) is is_restored


def test_every_cache_is_in_the_blob_and_comes_back(make_drill: MakeDrill) -> None:
    from deadpool.plugins.megatron import structure

    drill = make_drill(*OVERLAP)
    with keeping(drill.collect()) as keeper:
        drill.steps(1)  # megatron takes the counts of the first iteration over only as the next begins
        read = structure.read_caches(drill.objects)
        assert read["ready_counts"][0]
        assert all(counts and all(counts) for counts in read["ready_counts"])
        blob = keeper.take(1)
        keeper.drain()
        drill.steps(1)
        assert structure.read_caches(drill.objects) == read

        spare = make_drill(*OVERLAP)
        with keeping(spare.collect()) as theirs:
            assert structure.read_caches(spare.objects) != read
            theirs.banks = keeper.banks
            theirs.go_back(blob)
            assert structure.read_caches(spare.objects) == read
