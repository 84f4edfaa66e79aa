"""What the tests of snapshot share: banks in plain memory, processes with gloo, comparison bit for bit."""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deadpool.snapshot.blob import Blob, build_blob, read_blob
from deadpool.snapshot.capture import Bank, Capture, install_hooks
from deadpool.snapshot.codec import tensor_bytes
from deadpool.snapshot.frameworks.ddp import Serve
from deadpool.snapshot.layout import Layout
from deadpool.snapshot.restore import reset_after_abort, restore_blob, restore_rng, restore_tensors
from deadpool.snapshot.stateful import TrainingState, layout_of

DEADLINE_S = 40.0


class Aborted(RuntimeError):
    """Raised by an injected collective, as an aborted communicator raises."""


def make_bank(layout: Layout) -> Bank:
    return memoryview(bytearray(layout.unique_bytes)), memoryview(bytearray(layout.replicated_bytes))


def never_serve(group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> None:
    raise AssertionError("no collective has to be served here")


class Keeper:
    """One rank's snapshots as the runtime takes and restores them, without agents."""

    def __init__(self, state: TrainingState, serve: Serve = never_serve) -> None:
        self.state = state
        self.layout = layout_of(state)
        self.banks = [make_bank(self.layout), make_bank(self.layout)]
        self.ended: list[tuple[int, str | None]] = []
        self.began = 0
        self._serve = serve
        self.capture = Capture(
            self.layout,
            state.tensors,
            self.banks,
            on_done=lambda bank, reason: self.ended.append((bank, reason)),
            frozen=lambda: False,
        )
        self._remove_hooks = install_hooks([o for _, o in state.optimizers], self.capture, self._count)

    def take(self, step: int, bank: int = 0) -> bytes:
        blob = build_blob(self.state, step=step)
        self.capture.start(bank)
        return blob

    def drain(self) -> None:
        assert self.capture.drain(DEADLINE_S)

    def go_back(self, blob: bytes, bank: int = 0, *, reset: bool = True) -> Blob:
        self.drain()
        decoded = read_blob(blob)
        if reset:
            reset_after_abort(self.state)
        restore_tensors(self.state, self.layout, *self.banks[bank])
        restore_blob(self.state, decoded, serve=self._serve)
        restore_rng(self.state, decoded)
        return decoded

    def close(self) -> None:
        self._remove_hooks()
        self.capture.close()

    def _count(self) -> None:
        self.began += 1


@contextmanager
def keeping(state: TrainingState, serve: Serve = never_serve) -> Iterator[Keeper]:
    keeper = Keeper(state, serve)
    try:
        yield keeper
    finally:
        keeper.close()


def digest(state: TrainingState) -> str:
    """Hash of the bits of every tensor of the state."""
    found = hashlib.sha256()
    for item in state.tensors:
        found.update(item.name.encode())
        found.update(tensor_bytes(item.resolve()))
    return found.hexdigest()


def bits(value: torch.Tensor) -> str:
    return tensor_bytes(value).hex()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run `function(rank, *arguments)` in gloo processes; return the results in rank order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_run_rank,
                args=(function, rank, world_size, str(Path(folder) / "store"), ends[rank][1], arguments),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            results = [_receive(ends[rank][0], rank) for rank in range(world_size)]
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def _receive(end: Any, rank: int) -> tuple[bool, Any]:
    if not end.poll(DEADLINE_S):
        return False, f"no answer in {DEADLINE_S:.0f} s"
    try:
        answer: tuple[bool, Any] = end.recv()
    except EOFError:
        return False, f"rank {rank} died"
    return answer


def _run_rank(
    function: Callable[..., Any], rank: int, world_size: int, path: str, end: Any, arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=torch._C._distributed_c10d.FileStore(path, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        value = function(rank, *arguments)
        end.send((True, value))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        end.send((False, traceback.format_exc()))
