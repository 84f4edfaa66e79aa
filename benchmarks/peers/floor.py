"""What this machine needs at least: memory copies, gloo over loopback, communicators, imports, forks."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MIB_OF_FLOATS = (1 << 20) // 4
STATE_MIB = 120
ROUNDS = 6


def timed(act: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - begun_s)
    return seconds


def median_and_best(seconds: list[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(seconds), 4), "best_s": round(min(seconds), 4)}


def exchange(rank: int, world_size: int, store: dist.Store) -> dict[str, Any]:
    """Send and receive, and all-reduce, by size."""
    group = dist.ProcessGroupGloo(dist.PrefixStore("p2p", store), rank, world_size, timedelta(seconds=60))
    results = {}
    for mib in (1, 40, STATE_MIB):
        data = torch.ones(mib * MIB_OF_FLOATS)

        def pass_on(data: torch.Tensor = data) -> None:
            answer = data[:1]
            first = group.send([data], 1, 0) if rank == 0 else group.recv([data], 0, 0)
            first.wait()
            second = group.recv([answer], 1, 1) if rank == 0 else group.send([answer], 0, 1)
            second.wait()

        def reduce(data: torch.Tensor = data) -> None:
            group.allreduce([data]).wait()

        for name, act in (("send", pass_on), ("all-reduce", reduce)):
            group.barrier().wait()
            results[f"{name} {mib} MiB"] = median_and_best(timed(act, ROUNDS))
    return results


def build(rank: int, world_size: int, store: dist.Store) -> dict[str, Any]:
    """A communicator from the moment when all are there, with its first all-reduce."""
    seconds = []
    for number in range(ROUNDS):
        prefix = dist.PrefixStore(f"build{number}", store)
        prefix.set(f"{rank}", "1")
        prefix.wait([f"{other}" for other in range(world_size)])
        begun_s = time.perf_counter()
        group = dist.ProcessGroupGloo(prefix, rank, world_size, timedelta(seconds=30))
        group.allreduce([torch.ones(1)]).wait()
        seconds.append(time.perf_counter() - begun_s)
    return {f"communicator of {world_size} ranks": median_and_best(seconds)}


def _rank_main(
    measure: Callable[..., dict[str, Any]], rank: int, world_size: int, port: int, results: Any
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False)
    results.put((rank, measure(rank, world_size, store)))


def measure_with(measure: Callable[..., dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Run `measure` in `world_size` processes; what rank 0 found."""
    context = multiprocessing.get_context("spawn")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(measure, rank, world_size, server.port, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return found[0]


def fork_and_wait() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def main() -> None:
    torch.set_num_threads(1)
    source = torch.ones(STATE_MIB * MIB_OF_FLOATS)
    target = torch.empty_like(source)
    target.copy_(source)
    figures: dict[str, Any] = {
        "load": os.getloadavg()[0],
        f"copy {STATE_MIB} MiB": median_and_best(timed(lambda: target.copy_(source), 15)),
        f"clone {STATE_MIB} MiB, page faults included": median_and_best(timed(source.clone, 5)),
        "fork with two such tensors": median_and_best(timed(fork_and_wait, 9)),
    }
    for what in ("import torch", "pass"):
        command = [sys.executable, "-c", what]
        figures[f"python -c {what!r}"] = median_and_best(
            timed(lambda command=command: subprocess.run(command, check=True), 4)
        )
    figures |= measure_with(exchange, 2)
    for world_size in (2, 4, 8):
        figures |= measure_with(build, world_size)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
