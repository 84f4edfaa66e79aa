"""Data goes on with exactly the next batch, with the old iterator alive, across epochs and worker counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from deadpool.errors import ConfigError
from deadpool.snapshot.blob import build_blob, read_blob
from deadpool.snapshot.restore import restore_blob, restore_rng
from deadpool.snapshot.stateful import TrainingState, collect
from tests.unit.snapshot.support import never_serve

SAMPLES, BATCH, STEPS = 14, 4, 9  # four batches an epoch, the last one short: steps cross two epochs


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index * 10


class Stream(IterableDataset[int]):
    """Counts on, and says where it is."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < SAMPLES:
            self.next += 1
            yield self.next * 10
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def make_loader(kind: str, workers: int) -> Any:
    torch.manual_seed(11)
    if kind == "stream":
        return StatefulDataLoader(Stream(), batch_size=BATCH, num_workers=workers)
    if kind == "distributed":
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=2)
        return StatefulDataLoader(Numbers(), batch_size=BATCH, num_workers=workers, sampler=sampler)
    generator = torch.Generator().manual_seed(4) if kind == "shuffled by a generator" else None
    return StatefulDataLoader(
        Numbers(), batch_size=BATCH, num_workers=workers, shuffle=kind != "in order", generator=generator
    )


def train(
    state: TrainingState,
    loader: Any,
    first: int,
    blob: bytes | None,
    blobs: dict[int, bytes] | None = None,
) -> list[Any]:
    """The training loop of a user, entered at `first`, with a draw from each generator in every step."""
    found: list[Any] = []
    batches = iter(loader)
    for step in range(first, STEPS + 1):
        if step == first and blob is not None and read_blob(blob).in_loop:
            restore_rng(state, read_blob(blob))
        try:
            batch = next(batches)
        except StopIteration:
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(loader.sampler.epoch + 1)
            batches = iter(loader)
            batch = next(batches)
        found.append((batch.tolist(), torch.rand(()).item(), random.random(), float(np.random.rand())))
        if blobs is not None:
            blobs[step] = build_blob(state, step=step)
    return found


KINDS = ("in order", "shuffled", "shuffled by a generator", "distributed", "stream")


# Workers cost a second each: with them, the two kinds that keep state in different places.
@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in KINDS), ("shuffled by a generator", 2), ("stream", 2)]
)
def test_a_restored_loader_goes_on_with_the_next_batch(kind: str, workers: int) -> None:
    loader = make_loader(kind, workers)
    state = collect({"data": loader})
    blobs = {0: build_blob(state, step=0, in_loop=False)}
    expected = train(state, loader, 1, None, blobs)
    steps = (0, 3, 6) if workers else range(STEPS)
    for step in steps:
        blob = read_blob(blobs[step])
        rebuilt = make_loader(kind, workers)  # a spare; the loader that ran on, a survivor
        for target in (loader, rebuilt):
            target_state = collect({"data": target})
            restore_blob(target_state, blob, serve=never_serve)
            restore_rng(target_state, blob)
            assert train(target_state, target, step + 1, blobs[step]) == expected[step:]


def test_a_loader_that_does_not_keep_the_order_is_refused_by_name() -> None:
    loader: Any = StatefulDataLoader(Numbers(), num_workers=1, in_order=False)
    with pytest.raises(
        ConfigError, match=r"data: a StatefulDataLoader with in_order=False .*use in_order=True"
    ):
        collect({"data": loader})


def test_asking_a_loader_that_has_not_begun_starts_no_workers_and_draws_nothing() -> None:
    loader = make_loader("shuffled", workers=2)
    before = torch.get_rng_state()
    build_blob(collect({"data": loader}), step=0, in_loop=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert loader._iterator is None
