"""The layout: areas, offsets, groups, and refusal of another one."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool.core.types import ReplicatedGroup
from deadpool.errors import LayoutMismatch
from deadpool.snapshot.layout import (
    ALIGN_BYTES,
    PAGE_BYTES,
    Kind,
    Layout,
    TensorSpec,
    find_disagreements,
    plan_layout,
    replicated_buffers,
)


def spec(name: str, nbytes: int, ranks: tuple[int, ...] = ()) -> TensorSpec:
    return TensorSpec(name=name, dtype="uint8", shape=(nbytes,), nbytes=nbytes, ranks=ranks)


specs_of = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([(), (0,), (0, 1), (0, 1, 2), (2, 4)])),
    min_size=1,
    max_size=20,
).map(lambda items: [spec(f"t{index}", nbytes, ranks) for index, (nbytes, ranks) in enumerate(items)])


@given(specs_of)
def test_buffers_never_overlap_and_stay_in_aligned_areas(specs: list[TensorSpec]) -> None:
    layout = plan_layout(specs)
    assert [buffer.name for buffer in layout.buffers] == [item.name for item in specs]
    for kind, size in ((Kind.UNIQUE, layout.unique_bytes), (Kind.REPLICATED, layout.replicated_bytes)):
        placed = sorted((b.offset, b.offset + b.nbytes) for b in layout.buffers if b.kind is kind)
        assert all(start % ALIGN_BYTES == 0 for start, _ in placed)
        assert all(end <= start for (_, end), (start, _) in pairwise(placed))
        assert size % PAGE_BYTES == 0
        assert all(end <= size for _, end in placed)
    for span in layout.spans:
        inside = [b for b in layout.buffers if b.ranks == span.group.ranks]
        outside = [b for b in replicated_buffers(layout) if b.ranks != span.group.ranks and b.nbytes]
        end = span.start + span.nbytes
        assert all(span.start <= b.offset and b.offset + b.nbytes <= end for b in inside)
        assert not any(span.start <= b.offset < end for b in outside)
    assert Layout.from_json(layout.to_json()) == layout


def test_a_group_that_is_not_safe_is_unique() -> None:
    specs = [spec("a", 10, (0, 1)), spec("b", 10, (0, 2))]
    layout = plan_layout(specs, is_safe=lambda ranks: ranks == (0, 2))
    assert [(b.name, b.kind) for b in layout.buffers] == [("a", Kind.UNIQUE), ("b", Kind.REPLICATED)]
    assert layout.groups == (ReplicatedGroup(ranks=(0, 2)),)


def test_buffers_whose_hashes_differ_within_their_group_become_unique() -> None:
    layout = plan_layout([spec("a", 10, (0, 1)), spec("b", 10, (0, 1)), spec("c", 10)])
    assert find_disagreements(layout, {0: [1, 2], 1: [1, 2]}) == ()
    wrong = find_disagreements(layout, {0: [1, 2], 1: [1, 3]})
    assert wrong == ("b",)
    settled = layout.with_unique(wrong)
    assert [(b.name, b.kind) for b in settled.buffers] == [
        ("a", Kind.REPLICATED),
        ("b", Kind.UNIQUE),
        ("c", Kind.UNIQUE),
    ]
    assert layout.fitted_to(settled) == settled, "a spare was not there when hashes were compared"


def test_another_layout_is_refused_naming_what_differs() -> None:
    own = plan_layout([spec("a", 10), spec("b", 20), spec("c", 5)], derived=[("table", "00")])
    stored = plan_layout([spec("a", 10), spec("b", 24), spec("d", 5)], derived=[("table", "01")])
    with pytest.raises(LayoutMismatch) as raised:
        own.check_same(stored)
    text = str(raised.value)
    assert "d: stored, but not in this state" in text
    assert "c: in this state, but not stored" in text
    assert "b: here uint8[20]" in text and "stored uint8[24]" in text
    assert "table: rebuilt by the constructor with another value" in text
    assert "The script, its arguments and package versions must be the same" in text


def test_equal_layouts_have_equal_digests_and_an_order_counts() -> None:
    first, second = spec("a", 10), spec("b", 10)
    assert plan_layout([first, second]).digest == plan_layout([first, second]).digest
    assert plan_layout([first, second]).digest != plan_layout([second, first]).digest
    with pytest.raises(LayoutMismatch, match=r"a: here uint8\[10\] \(unique at 0"):
        plan_layout([first, second]).check_same(plan_layout([second, first]))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", json.dumps({"version": 99}).encode()])
def test_bytes_that_are_no_layout_are_refused(data: bytes) -> None:
    with pytest.raises(LayoutMismatch):
        Layout.from_json(data)


def test_agents_read_a_layout_without_loading_torch() -> None:
    code = "import sys, deadpool.snapshot.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
