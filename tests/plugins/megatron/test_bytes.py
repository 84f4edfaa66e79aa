"""A captured step sends 12 bytes per parameter / data-parallel ranks, and the blob; counted at the socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deadpool.snapshot.blob import build_blob
from deadpool.snapshot.capture import Capture
from deadpool.snapshot.layout import PAGE_BYTES, Kind
from deadpool.snapshot.stateful import layout_of
from deadpool.store.segment import BANKS, SegmentLayout
from deadpool.store.tcp import TcpTransport
from tests.contract.transport.support import WAIT_S, Hosts, name
from tests.plugins.megatron.drill import MakeDrill, build_alone
from tests.unit.snapshot.support import run_ranks

BYTES_PER_PARAMETER = 12  # master and two moments, 32 bits each


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(lambda: TcpTransport("token of the job"))
    yield made
    made.close()


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16", "--overlap")], ids=["fp32", "bf16, overlap"])
def test_a_captured_step_sends_twelve_bytes_per_parameter_and_the_blob(
    make_drill: MakeDrill, hosts: Hosts, options: tuple[str, ...]
) -> None:
    owner, holder = hosts.add("owner"), hosts.add("holder")
    drill = make_drill(*options)
    state = drill.collect()
    layout = layout_of(state)
    sizes = SegmentLayout(
        once_bytes=0, blob_capacity=1 << 18, unique_bytes=layout.unique_bytes, replicated_bytes=0
    )
    segment = owner.make_own(0, sizes)
    banks = [(segment.unique_view(bank), segment.replicated_view(bank)) for bank in BANKS]
    capture = Capture(layout, state.tensors, banks, on_done=lambda bank, why: None, frozen=lambda: False)
    wanted = BYTES_PER_PARAMETER * sum(param.numel() for param in drill.trainer.chunks[0].parameters())
    pages = -(-wanted // PAGE_BYTES) * PAGE_BYTES
    for step in (0, 1):
        drill.step()
        blob = build_blob(state, step=step)
        segment.begin(step, name(step))
        segment.blob_view(step)[: len(blob)] = blob
        capture.start(step)
        assert capture.drain(WAIT_S)
        segment.complete(step, blob_len=len(blob))
        before = owner.replicator.metrics.as_dict()["bytes_sent"]
        owner.replicator.push_captured(0, name(step), step, "holder", name(0) if step else None)
        assert owner.await_held() == name(step)
        assert owner.replicator.metrics.as_dict()["bytes_sent"] - before == pages + len(blob)
    capture.close()
    del banks
    received = holder.server.metrics.as_dict()["bytes_received"]
    assert received == owner.replicator.metrics.as_dict()["bytes_sent"]


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_shards_of_two_data_parallel_ranks_are_the_twelve_bytes_together() -> None:
    found = run_ranks(_sizes, 2)
    parameters = {count for count, _ in found}
    assert len(parameters) == 1
    assert sum(shard for _, shard in found) == BYTES_PER_PARAMETER * parameters.pop()
    assert min(shard for _, shard in found) > 0


def _sizes(rank: int) -> tuple[int, int]:
    """Parameters of the model, and bytes of this rank's shard."""
    drill = build_alone("--dtype", "bf16")
    layout = layout_of(drill.collect())
    assert {buffer.kind for buffer in layout.buffers} == {Kind.UNIQUE}
    count = sum(param.numel() for param in drill.trainer.chunks[0].parameters())
    return count, sum(buffer.nbytes for buffer in layout.buffers)
