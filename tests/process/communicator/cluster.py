"""Real processes for the communicator tests: the test plays the agent, workers run a scenario."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection, reduction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool.communicator.extension import MISSING
from deadpool.communicator.groups import Communicators
from deadpool.communicator.rendezvous import RendezvousStore
from deadpool.communicator.rendezvous_server import RendezvousServer

TOKEN = "test"
START_S = 40.0
"""For the first event of a worker: it imports torch, on cores that others use too."""

EVENT_S = 15.0
_MEETING_GENERATION = 1_000_000
PAGE_BYTES = 65536
_FRAME = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQQQ")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "deadpool.communicator.groups"]
)

Scenario = Callable[["Seat"], Any]


def gap_of_the_fallback(what: str, *, raises: type[Exception]) -> pytest.MarkDecorator:
    """Mark a test that must fail without the extension: one line of the table in docs/fallback.md."""
    return pytest.mark.xfail(bool(MISSING), strict=True, raises=raises, reason=f"docs/fallback.md: {what}")


class Seat:
    """What a scenario function gets: one worker process."""

    def __init__(
        self, rank: int, world_size: int, port: int, pipe: connection.Connection, close_fd: int, page_fd: int
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.close_fd = close_fd
        self.page_fd = page_fd
        self.port = port
        self._pipe = pipe
        self._hearing = threading.Lock()

    def communicators(self, *, timeout_s: float = 120.0, rank: int | None = None) -> Communicators:
        """Communicators with handles installed. The timeout is long: nothing may depend on it."""
        made = Communicators(
            "job",
            self.rank if rank is None else rank,
            self.world_size,
            timeout_s,
            self.close_fd,
            self.page_fd,
        )
        made.install()
        return made

    def join(self, generation: int = 1) -> Communicators:
        """Communicators with a default process group."""
        made = self.communicators()
        made.init_process_group(self.store(generation))
        self.meet("joined")
        return made

    def meet(self, place: str) -> None:
        """Wait for all ranks outside of any communicator: whoever returns may close, stop or exit."""
        store = self.store(_MEETING_GENERATION)
        store.set(f"{place}/{self.rank}", "1")
        store.wait([f"{place}/{rank}" for rank in range(self.world_size)])
        store.close()

    def store(self, generation: int, *, timeout_s: float = 30.0) -> RendezvousStore:
        return RendezvousStore(
            "127.0.0.1", self.port, token=TOKEN, generation=generation, timeout_s=timeout_s
        )

    def tell(self, event: str, payload: Any = None) -> None:
        self._pipe.send((event, payload))

    def hear(self, timeout_s: float = START_S) -> Any:
        """The next message of the test; of several threads that listen, one gets it."""
        with self._hearing:
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"rank {self.rank} heard nothing for {timeout_s} s")
            return self._pipe.recv()


def _run(
    scenario: Scenario,
    rank: int,
    world_size: int,
    port: int,
    pipe: connection.Connection,
    close_end: socket.socket | None,
    page_fd: int,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    close_fd = close_end.fileno() if close_end is not None else -1
    seat = Seat(rank, world_size, port, pipe, close_fd, page_fd)
    try:
        result = scenario(seat)
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        raise SystemExit(1) from error
    pipe.send(("result", result))


class _PassedFd:
    """A descriptor among the arguments of a process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self._fd),)


def _detach(passed: Any) -> int:
    fd: int = passed.detach()
    return fd


class Worker:
    """The test's end of one worker."""

    def __init__(self, scenario: Scenario, rank: int, world_size: int, port: int) -> None:
        self.rank = rank
        self._pipe, child_pipe = _context.Pipe()
        self._close_end, child_close = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page_fd = os.memfd_create("page", os.MFD_CLOEXEC)
        os.ftruncate(page_fd, PAGE_BYTES)
        self._page = mmap.mmap(page_fd, PAGE_BYTES)
        self.process = _context.Process(
            target=_run, args=(scenario, rank, world_size, port, child_pipe, child_close, _PassedFd(page_fd))
        )
        try:
            self.process.start()
        finally:
            child_pipe.close()
            child_close.close()
            os.close(page_fd)

    def wait(self, event: str, timeout_s: float = EVENT_S) -> Any:
        """The payload of the next event, which must be `event`."""
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"rank {self.rank}: no {event!r} within {timeout_s} s")
        try:
            name, payload = self._pipe.recv()
        except EOFError:
            self.process.join(EVENT_S)
            raise AssertionError(
                f"rank {self.rank} ended with {self.process.exitcode}, no {event!r}"
            ) from None
        assert name == event, f"rank {self.rank}: {name} {payload}"
        return payload

    def say(self, message: Any = None) -> None:
        self._pipe.send(message)

    def order_close(self, generation: int) -> None:
        """As the agent does."""
        self._close_end.send(_FRAME.pack(1, generation))

    def wait_closed(self, generation: int, timeout_s: float = EVENT_S) -> None:
        self._close_end.settimeout(timeout_s)
        assert _FRAME.unpack(self._close_end.recv(64)) == (2, generation)

    def hang_up(self) -> None:
        """As a dead agent does."""
        self._close_end.close()

    def field(self, offset: int) -> int:
        value: int = struct.unpack_from("<Q", self._page, offset)[0]
        return value

    def entries(self) -> list[tuple[int, int, int, int]]:
        """Name hash, issued, completed, bytes of each handle."""
        return [_ENTRY.unpack_from(self._page, 4096 + 32 * index) for index in range(self.field(72))]

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def exit_code(self, timeout_s: float = EVENT_S) -> int | None:
        self.process.join(timeout_s)
        return self.process.exitcode

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(EVENT_S)
        with contextlib.suppress(EOFError, ConnectionError):
            while self._pipe.poll():
                print(f"rank {self.rank}, not read:", *self._pipe.recv())
        self.process.close()
        self._pipe.close()
        self._close_end.close()
        self._page.close()


class Cluster:
    """Workers of one scenario and their rendezvous; a context manager."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.server = RendezvousServer("127.0.0.1", TOKEN)
        self._workers: list[Worker] = []

    def __enter__(self) -> Cluster:
        self._port = self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()  # prints what nobody read: the cause of a failure is often in another rank
        self.server.close()

    def start(self, scenario: Scenario, rank: int) -> Worker:
        worker = Worker(scenario, rank, self.world_size, self._port)
        self._workers.append(worker)
        return worker

    def start_all(self, scenario: Scenario) -> list[Worker]:
        return [self.start(scenario, rank) for rank in range(self.world_size)]


def run_all(scenario: Scenario, world_size: int, timeout_s: float = START_S) -> list[Any]:
    """Run `scenario` on all ranks to its end; returns their results."""
    with Cluster(world_size) as cluster:
        workers = cluster.start_all(scenario)
        results = [worker.wait("result", timeout_s) for worker in workers]
        assert [worker.exit_code() for worker in workers] == [0] * world_size
    return results


def all_reduce_value(value: float, group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.full((1000,), float(value))
    dist.all_reduce(tensor, group=group)
    return tensor[-1].item()
