"""What a captured step sends to its holder, counted where it is sent, is what the configuration says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deadpool.snapshot.blob import build_blob
from deadpool.snapshot.capture import Capture
from deadpool.snapshot.layout import ALIGN_BYTES, PAGE_BYTES
from deadpool.snapshot.stateful import layout_of
from deadpool.store.segment import BANKS, SegmentLayout
from deadpool.store.tcp import TcpTransport
from tests.contract.transport.support import WAIT_S, Hosts, name
from tests.plugins.deepspeed.engines import SIZE, Kind, Trainer, make_config, trainer

STEP_BYTES = 4  # Adam counts steps in a tensor of one float


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(lambda: TcpTransport("token of the job"))
    yield made
    made.close()


def unique_bytes(kind: Kind, numels: list[int], frozen: list[int]) -> int:
    """From the configuration alone: masters and two moments of one rank's partition, and their padding.

    Args:
        kind: stage and type.
        numels: elements of each trainable parameter.
        frozen: elements of each other parameter; stage 3 partitions those, too.
    """
    if kind.stage == 0:
        return 0
    if kind.stage == 3:
        limit = make_config(kind)["zero_optimization"]["sub_group_size"]
        partitions = [0]
        for numel in numels:
            partitions[-1] += -(-numel // SIZE)
            if partitions[-1] >= limit:
                partitions.append(0)
        element = 2 if kind.dtype == "bf16" else 4
        further = [element * -(-numel // SIZE) for numel in frozen]
    else:
        partitions = [-(-sum(numels) // (2 * SIZE)) * 2]
        further = []
    buffers = [size for partition in partitions if partition for size in (*[4 * partition] * 3, STEP_BYTES)]
    return _rounded(sum(_rounded(size, ALIGN_BYTES) for size in buffers + further), PAGE_BYTES)


@pytest.mark.parametrize(
    "kind", [Kind(stage=0), Kind(stage=1), Kind(stage=2, dtype="fp32"), Kind(stage=3)], ids=str
)
def test_a_captured_step_sends_the_unique_bytes_of_the_configuration_and_the_blob(
    kind: Kind, hosts: Hosts
) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    with trainer(kind) as own:
        numels, frozen = _numels(own)
        layout = layout_of(own.state)
        sizes = SegmentLayout(
            once_bytes=0,
            blob_capacity=1 << 18,
            unique_bytes=layout.unique_bytes,
            replicated_bytes=layout.replicated_bytes,
        )
        segment = owner.make_own(0, sizes)
        banks = [(segment.unique_view(bank), segment.replicated_view(bank)) for bank in BANKS]
        capture = Capture(
            layout, own.state.tensors, banks, on_done=lambda bank, why: None, frozen=lambda: False
        )
        for step in (0, 1):
            own.step(step)
            blob = build_blob(own.state, step=step)
            segment.begin(step, name(step))
            segment.blob_view(step)[: len(blob)] = blob
            capture.start(step)
            assert capture.drain(WAIT_S)
            segment.complete(step, blob_len=len(blob))
            before = owner.replicator.metrics.as_dict()["bytes_sent"]
            owner.replicator.push_captured(0, name(step), step, "holder", name(0) if step else None)
            assert owner.await_held() == name(step)
            sent = owner.replicator.metrics.as_dict()["bytes_sent"] - before
            assert sent == unique_bytes(kind, numels, frozen) + len(blob)
        capture.close()
        del banks
        received = holder.server.metrics.as_dict()["bytes_received"]
        assert received == owner.replicator.metrics.as_dict()["bytes_sent"]


def _numels(own: Trainer) -> tuple[list[int], list[int]]:
    params = list(own.engine.module.parameters())
    sizes = {is_trained: [] for is_trained in (True, False)}  # type: dict[bool, list[int]]
    for param in params:
        sizes[param.requires_grad].append(getattr(param, "ds_numel", param.numel()))
    return sizes[True], sizes[False]


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit
