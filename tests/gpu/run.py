"""Everything that needs a GPU, in one run of a few minutes on one of them: `python tests/gpu/run.py`.

Prints one JSON object, a figure or a verdict for each check. Ends with 0 if all hold, 1 if one does not, and
77 without CUDA (nothing was checked). `--gb` sets the sizes of the captured state.

    capture   a state is captured beside a training step; the ratio of step times with and without
    torn      the state changes right behind the wait, while it is still copied: each copy is exact
    abort     a collective does not complete, an optimizer step and a capture are enqueued behind it; then an
              abort: no copy of that step counts, the device comes to rest, NCCL and the state are restored
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from deadpool.communicator.extension import MISSING, native
from deadpool.communicator.groups import Communicators
from deadpool.communicator.nccl_environment import NCCL_ENVIRONMENT
from deadpool.runtime.device import Cuda, come_to_rest
from deadpool.snapshot.capture import bank_tensors
from deadpool.snapshot.capture_cuda import CudaCapture
from deadpool.snapshot.layout import Layout
from deadpool.snapshot.restore import restore_tensors
from deadpool.snapshot.stateful import TrainingState, collect, layout_of

NOTHING_CHECKED = 77  # what automake and others call a skipped test
GB = 1 << 30
STEPS = 12
WAIT_S = 120.0
STUCK_CYCLES = 20_000_000_000  # ten seconds of a spinning kernel: stands for a peer that never comes


class Rig:
    """A model of one size, its optimizer, its banks in host memory and the capture between them."""

    def __init__(self, n_bytes: int) -> None:
        side = 1024
        layers = max(
            1, n_bytes // 12 // (4 * side * side) * 4
        )  # Adam: parameter and two moments, 4 bytes each
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(side, side, bias=False, device="cuda") for _ in range(layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.state: TrainingState = collect({"model": self.model, "optimizer": self.optimizer})
        self.layout: Layout = layout_of(self.state)
        sizes = self.layout.unique_bytes, self.layout.replicated_bytes
        self.banks = [(memoryview(bytearray(sizes[0])), memoryview(bytearray(sizes[1]))) for _ in range(2)]
        self.ended: list[tuple[int, str | None]] = []
        self.is_frozen: Callable[[], bool] = lambda: False
        self.capture = CudaCapture(
            self.layout,
            self.state.tensors,
            self.banks,
            on_done=lambda bank, reason: self.ended.append((bank, reason)),
            frozen=lambda: self.is_frozen(),
        )
        self.inputs = torch.randn(1024, side, device="cuda")

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.capture.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self) -> list[torch.Tensor]:
        return [item.resolve().detach() for item in self.state.tensors]

    def held(self, bank: int) -> list[torch.Tensor]:
        return bank_tensors(self.layout, *self.banks[bank])

    def drain(self) -> None:
        if not self.capture.drain(WAIT_S):
            raise TimeoutError(f"a capture did not end within {WAIT_S:g} s")

    def close(self) -> None:
        self.drain()
        self.capture.close()


def seconds_per_step(rig: Rig, *, captures: bool) -> float:
    """Median over the steps, the device waited for after each."""
    times = []
    for step in range(STEPS):
        torch.cuda.synchronize()
        begin_s = time.monotonic()
        if captures:
            rig.capture.start(step % 2)
        rig.step()
        torch.cuda.synchronize()
        times.append(time.monotonic() - begin_s)
    rig.drain()
    return statistics.median(times[2:])


def check_capture(gigabytes: float) -> dict[str, Any]:
    """Step time with a capture in every step against without, and how fast the copy is."""
    rig = Rig(int(gigabytes * GB))
    try:
        plain_s = seconds_per_step(rig, captures=False)
        captured_s = seconds_per_step(rig, captures=True)
        begin_s = time.monotonic()
        rig.capture.start(0)
        rig.drain()
        copy_s = time.monotonic() - begin_s
        n_bytes = rig.layout.unique_bytes + rig.layout.replicated_bytes
        exact = all(torch.equal(live.cpu(), held) for live, held in zip(rig.live(), rig.held(0), strict=True))
        return {
            "holds": exact and all(reason is None for _, reason in rig.ended),
            "bytes": n_bytes,
            "plain_step_s": plain_s,
            "captured_step_s": captured_s,
            "ratio": captured_s / plain_s,
            "copy_s": copy_s,
            "copy_gb_s": n_bytes / copy_s / GB,
            "device_waits": rig.capture.stats.waits,
        }
    finally:
        rig.close()


def check_torn(n_bytes: int) -> dict[str, Any]:
    """The state is changed right behind the wait: each of 20 copies is of one moment."""
    rig = Rig(n_bytes)
    wrong = 0
    try:
        for round_ in range(20):
            with torch.no_grad():
                torch._foreach_zero_(rig.live())
                torch._foreach_add_([t for t in rig.live() if t.is_floating_point()], float(round_))
            rig.capture.start(round_ % 2)
            rig.capture.wait()
            with torch.no_grad():
                torch._foreach_mul_([t for t in rig.live() if t.is_floating_point()], -3.0)
            rig.drain()
            wrong += any(
                not bool((held == float(round_)).all())
                for held in rig.held(round_ % 2)
                if held.is_floating_point() and held.numel() > 1
            )
        reasons = [reason for _, reason in rig.ended if reason is not None]
        return {"holds": not wrong and not reasons, "copies": 20, "torn": wrong, "refused": reasons[:3]}
    finally:
        rig.close()


def check_abort(n_bytes: int) -> dict[str, Any]:
    """A collective that never completes, a step and a capture behind it, an abort, a rebuild, a restore."""
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    communicators = Communicators("gpu", 0, 1, 600.0)
    communicators.install()
    communicators.init_process_group(_store(1))
    rig = Rig(n_bytes)
    rig.is_frozen = communicators.frozen
    try:
        rig.step()
        dist.all_reduce(torch.ones(8, device="cuda"))
        rig.capture.start(0)
        rig.drain()
        good = [tensor.clone() for tensor in rig.live()]
        # From here on garbage: the collective is stuck behind a kernel, as behind a peer that never comes.
        torch.cuda._sleep(STUCK_CYCLES)  # type: ignore[no-untyped-call]
        work = dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
        assert work is not None
        work.wait()
        rig.step()
        rig.capture.start(1)
        before = len(rig.ended)
        begin_s = time.monotonic()
        native.close(1)
        close_s = time.monotonic() - begin_s
        come_to_rest(Cuda(), rig.drain, limit_s=WAIT_S)
        rest_s = time.monotonic() - begin_s
        of_that_step = rig.ended[before:]
        begin_s = time.monotonic()
        communicators.open(2, _store(2))
        rebuild_s = time.monotonic() - begin_s
        begin_s = time.monotonic()
        unique, replicated = rig.banks[0]
        restore_tensors(rig.state, rig.layout, unique, replicated)
        torch.cuda.synchronize()
        restore_s = time.monotonic() - begin_s
        equal = all(torch.equal(live, then) for live, then in zip(rig.live(), good, strict=True))
        total = torch.ones(8, device="cuda")
        dist.all_reduce(total)
        works = bool(total.cpu()[0] == 1.0)
        refused = bool(of_that_step) and all(reason is not None for _, reason in of_that_step)
        return {
            "holds": refused and equal and works,
            "copy_of_the_aborted_step_refused": refused,
            "restored_exactly": equal,
            "collective_after_the_rebuild": works,
            "close_s": close_s,
            "device_at_rest_s": rest_s,
            "rebuild_s": rebuild_s,
            "restore_s": restore_s,
        }
    finally:
        rig.close()
        communicators.destroy_all()
        communicators.shutdown()


def _store(generation: int) -> c10d.Store:
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=60))
    return c10d.PrefixStore(f"generation-{generation}", store)


def main() -> int:
    """Run all checks; see the module."""
    parser = argparse.ArgumentParser(description="Checks of DeadPool that need one GPU.")
    parser.add_argument(
        "--gb", type=float, nargs="+", default=[1.0, 10.0], help="sizes of the captured state"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"tests/gpu: nothing was checked: torch {torch.__version__} sees no CUDA device", file=sys.stderr
        )
        return NOTHING_CHECKED
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        f"capture_{size:g}gb": lambda size=size: check_capture(size)  # type: ignore[misc]
        for size in arguments.gb
    }
    checks["torn"] = lambda: check_torn(GB)
    if MISSING:
        print(f"tests/gpu: no extension ({MISSING}): the check of an abort fails", file=sys.stderr)
    checks["abort"] = lambda: check_abort(GB)
    found: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception as error:  # the other checks still say something
            found[name] = {"holds": False, "error": f"{type(error).__name__}: {error}"}
        torch.cuda.empty_cache()
    found["device"] = torch.cuda.get_device_name()
    found["torch"] = str(torch.__version__)
    print(json.dumps(found, indent=2))
    return 0 if all(found[name]["holds"] for name in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
