"""Capture: exact although the state changes right after the wait, refused when it could be torn."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deadpool.errors import LayoutMismatch, SnapshotError
from deadpool.snapshot import capture as capture_module
from deadpool.snapshot.capture import Capture, bank_tensors, install_hooks
from deadpool.snapshot.stateful import TrainingState, collect, layout_of
from deadpool.snapshot.tensors import NamedTensor
from tests.unit.snapshot.support import DEADLINE_S, Keeper, digest, keeping, make_bank

TENSORS, NUMBERS = 24, 100_000  # 10 MB: a copy takes milliseconds


def make_state() -> tuple[TrainingState, list[torch.Tensor]]:
    """A state of plain tensors that nothing but the test changes."""
    tensors = [torch.full((NUMBERS,), float(index)) for index in range(TENSORS)]
    names = [f"t{index}" for index in range(TENSORS)]
    items = tuple(
        NamedTensor(name=name, resolve=lambda tensor=tensor: tensor, at_boundary=False)  # type: ignore[misc]
        for name, tensor in zip(names, tensors, strict=True)
    )
    empty: Any = ()
    state = TrainingState(
        tensors=items,
        derived=empty,
        params=empty,
        models=empty,
        modules=empty,
        optimizers=empty,
        scalars=empty,
        objects=empty,
        extra_state=empty,
        ddp=empty,
        fsdp=empty,
        adapters=empty,
    )
    return state, tensors


class WaitedFor(threading.Event):
    """Set from the start; sets another event as soon as somebody waits for this one."""

    def __init__(self, then: threading.Event) -> None:
        super().__init__()
        self._then = then
        self.set()

    def wait(self, timeout: float | None = None) -> bool:
        self._then.set()
        return super().wait(timeout)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def held(keeper: Keeper, bank: int) -> list[torch.Tensor]:
    return bank_tensors(keeper.layout, *keeper.banks[bank])


def is_exact(keeper: Keeper, bank: int, value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in held(keeper, bank))


def test_fifty_snapshots_are_exact_although_every_tensor_changes_right_after_the_wait() -> None:
    state, tensors = make_state()
    with keeping(state) as keeper:
        for step in range(50):
            torch._foreach_zero_(tensors)
            torch._foreach_add_(tensors, float(step))
            keeper.capture.start(step % 2)
            keeper.capture.wait()
            torch._foreach_mul_(tensors, -1.0)
            keeper.drain()
            assert is_exact(keeper, step % 2, float(step))
        assert keeper.ended == [(step % 2, None) for step in range(50)]


def test_without_the_wait_the_same_drill_tears_snapshots() -> None:
    state, tensors = make_state()
    with keeping(state) as keeper:
        torn = 0
        for step in range(10):
            torch._foreach_zero_(tensors)
            keeper.capture.start(step % 2)
            torch._foreach_sub_(tensors, 1.0)
            keeper.drain()
            torn += not is_exact(keeper, step % 2, 0.0)
        assert torn > 0


def test_a_copy_during_which_a_tensor_changes_does_not_count_and_names_it() -> None:
    state, tensors = make_state()
    with keeping(state) as keeper:
        release = hold_copies(keeper.capture)
        keeper.capture.start(0)
        tensors[3].add_(1.0)
        release.set()
        keeper.drain()
        reason = keeper.ended[0][1]
        assert reason is not None and reason.startswith("t3 changed while copied: only optimizer.step")


def test_the_optimizer_step_waits_for_the_copy_and_says_that_it_begins() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})
    with keeping(state) as keeper:
        release = hold_copies(keeper.capture)
        keeper.capture._copied = WaitedFor(release)  # the copy goes on when somebody waits for it
        keeper.take(step=0)
        model(torch.randn(4, 8)).sum().backward()
        assert keeper.ended == []
        optimizer.step()
        assert keeper.began == 1
        assert keeper.capture.stats.waits == 1
        assert keeper.capture.stats.waited_s > 0.0
        optimizer.step()
        assert keeper.capture.stats.waits == 1, "idle: no wait"
        assert keeper.began == 2


def test_a_boundary_without_an_optimizer_step_waits_for_the_copy_before() -> None:
    state, _ = make_state()
    with keeping(state) as keeper:
        keeper.capture.start(0)
        keeper.capture.start(1)
        keeper.drain()
        assert keeper.ended == [(0, None), (1, None)]


def test_buffers_are_copied_at_the_boundary_and_parameters_in_the_background() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})
    with keeping(state) as keeper:
        model(torch.randn(4, 8))
        expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
        keeper.take(step=1)
        model(torch.randn(4, 8))  # the next forward changes the running statistics at once
        keeper.drain()
        stored = {item.name: tensor for item, tensor in zip(state.tensors, held(keeper, 0), strict=True)}
        for name, buffer in expected.items():
            assert torch.equal(stored[f"model.{name}"], buffer)
        assert not torch.equal(expected["1.running_mean"], dict(model.named_buffers())["1.running_mean"])
        assert keeper.ended == [(0, None)]


def test_optimizer_step_counts_are_captured_and_restored_with_the_rest() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})

    def step() -> None:
        model(torch.randn(4, 8)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with keeping(state) as keeper:
        step()
        blob, before = keeper.take(step=1), digest(state)
        for _ in range(3):
            step()
        assert digest(state) != before
        keeper.go_back(blob)
        assert digest(state) == before
        assert {float(entry["step"]) for entry in optimizer.state.values()} == {1.0}


def test_a_moved_storage_is_refused_by_name() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})
    with keeping(state) as keeper:
        next(model.parameters()).data = torch.zeros(8, 8)
        keeper.capture.start(0)
        keeper.drain()
        [(bank, reason)] = keeper.ended
        assert bank == 0
        assert re.search(r"model\.0\.weight moved to other memory.*in place", reason or "")


def test_replaced_optimizer_state_is_refused_by_name() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})
    with keeping(state) as keeper:
        first = next(model.parameters())
        optimizer.state[first]["exp_avg"] = torch.zeros(8, 8)
        keeper.capture.start(0)
        keeper.drain()
        assert "optimizer.state.model.0.weight.exp_avg moved" in (keeper.ended[0][1] or "")


def test_what_a_copy_found_moved_is_raised_from_then_on_until_it_is_back() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})
    with keeping(state) as keeper:
        weight = next(model.parameters())
        kept = weight.data
        weight.data = torch.zeros(8, 8)
        keeper.capture.start(0)
        keeper.drain()
        for _ in range(2):
            with pytest.raises(LayoutMismatch, match=r"model\.0\.weight moved to other memory.*in place"):
                keeper.capture.start(0)
        weight.data = kept
        keeper.capture.start(0)
        keeper.drain()
        assert [reason is None for _, reason in keeper.ended] == [False, True]


def test_a_replaced_buffer_of_the_same_shape_is_captured_and_another_shape_refused() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})
    with keeping(state) as keeper:
        norm = model.get_submodule("1")
        norm.running_mean = torch.full((8,), 3.0)
        blob = keeper.take(step=1)
        norm.running_mean = torch.zeros(8)
        keeper.go_back(blob)
        assert torch.equal(model.get_buffer("1.running_mean"), torch.full((8,), 3.0))
        norm.running_mean = torch.zeros(9)
        with pytest.raises(LayoutMismatch, match=r"model\.1\.running_mean is now float32\[9\]"):
            keeper.take(step=2)


def test_a_copy_that_completes_after_the_freeze_is_not_reported_as_complete() -> None:
    state, _ = make_state()
    layout = layout_of(state)
    is_frozen = threading.Event()
    ended: list[str | None] = []
    capture = Capture(
        layout,
        state.tensors,
        [make_bank(layout), make_bank(layout)],
        on_done=lambda bank, reason: ended.append(reason),
        frozen=is_frozen.is_set,
    )
    release = hold_copies(capture)
    capture.start(0)
    is_frozen.set()
    release.set()
    assert capture.drain(DEADLINE_S)
    capture.close()
    assert ended == ["frozen: the communicators of this generation were closed"]


def test_a_cancelled_copy_stops_between_chunks_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "CHUNK_BYTES", 4 * NUMBERS)
    state, tensors = make_state()
    with keeping(state) as keeper:
        assert len(keeper.capture._chunks) == TENSORS
        release = hold_copies(keeper.capture)
        keeper.capture.start(0)
        assert not keeper.capture.drain(0.01)
        keeper.capture.cancel()
        release.set()
        keeper.drain()
        assert keeper.ended == [(0, "cancelled")]
        assert not torch.equal(held(keeper, 0)[-1], tensors[-1]), "the rest was not copied"
        keeper.capture.start(1)
        keeper.drain()
        assert keeper.ended[-1] == (1, None), "a cancelled copy leaves nothing behind"


def test_a_failing_report_neither_hangs_nor_hides() -> None:
    state, _ = make_state()
    layout = layout_of(state)

    def fail(bank: int, reason: str | None) -> None:
        raise OSError("the agent is gone")

    seen: list[str] = []
    hook, threading.excepthook = threading.excepthook, lambda args: seen.append(str(args.exc_value))
    capture = Capture(layout, state.tensors, [make_bank(layout)] * 2, on_done=fail, frozen=lambda: False)
    try:
        capture.start(0)
        assert capture.drain(DEADLINE_S)
        capture.wait()
        capture._thread.join(DEADLINE_S)
        with pytest.raises(SnapshotError, match="the capture thread has ended"):
            capture.start(1)
    finally:
        threading.excepthook = hook
        capture.close()
    assert seen == ["the agent is gone"]


def test_starting_is_cheap_and_the_copy_leaves_the_trainings_threads_alone() -> None:
    threads = torch.get_num_threads()
    state, _ = make_state()
    with keeping(state) as keeper:
        assert torch.get_num_threads() == threads
        durations_s = []
        for step in range(20):
            begin_s = time.perf_counter()
            keeper.capture.start(step % 2)
            durations_s.append(time.perf_counter() - begin_s)
            keeper.drain()
        copied_s = keeper.capture.stats.copied_s / 20
        assert sorted(durations_s)[10] < max(0.001, copied_s), "a start must not contain the copy"


def test_the_hooks_can_be_removed() -> None:
    model, optimizer = make_model()
    state = collect({"model": model, "optimizer": optimizer})
    with keeping(state) as keeper:
        calls: list[int] = []
        remove = install_hooks([optimizer], keeper.capture, lambda: calls.append(1))
        optimizer.step()
        remove()
        optimizer.step()
        assert calls == [1]


def hold_copies(capture: Capture) -> threading.Event:
    """Make the copying thread wait, before it copies, for the returned event."""
    release = threading.Event()
    copy: Callable[[Any], str | None] = capture._copy

    def wait_and_copy(job: Any) -> str | None:
        assert release.wait(DEADLINE_S)
        return copy(job)

    capture._copy = wait_and_copy  # type: ignore[method-assign]
    return release
