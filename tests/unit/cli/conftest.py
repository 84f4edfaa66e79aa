"""Run folders made by hand: an undisturbed run of two ranks and six steps, or a disturbed one; ports."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from deadpool.report import AgentStatus
from deadpool.runtime.ipc import CONTROL_FRAME_BYTES, Channel, ChannelClosed
from deadpool.runtime.messages import StatusReply, StatusRequest

WORLD_SIZE = 2
STEPS = 6


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def event(name: str, moment_s: float, generation: int = 1, **fields: Any) -> dict[str, Any]:
    head = {"event": name, "run_id": "r", "member": "h0-a", "generation": generation}
    return {**head, "monotonic_s": moment_s, "wall_s": 1e9 + moment_s, **fields}


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return build_run


def build_run(folder: Path, *, disturbed: bool = False) -> Path:
    """A finished run; the disturbed one lost rank 1 at step 4, and a spare took over from step 3."""
    for rank in range(WORLD_SIZE):
        lines = [record(rank, step, 1) for step in range(1, (4 if disturbed else STEPS + 1))]
        if disturbed:
            lines += [record(rank, step, 2) for step in range(4, STEPS + 1)]
        write_lines(folder / "records" / f"rank-{rank}.jsonl", lines)
        pid = 200 if disturbed and rank == 1 else 100 + rank
        digests = {
            "rank": rank,
            "pid": pid,
            "member": f"h{rank}-a",
            "initial": {"weight": "00", "bias": "01"},
            "final": {"weight": f"a{rank}", "bias": "b0"},
            "blob": {"rng.torch": f"c{rank}", "data": "d0"},
            "steps": STEPS,
        }
        write_lines(folder / "digests" / f"rank-{rank}.json", [digests])
    workers = [worker(rank, 100 + rank, 1, "active") for rank in range(WORLD_SIZE)]
    events = [event("view.published", 1, phase="running", slots="h0-a,h1-a", reason="start")]
    events.append(event("snapshot.committed", 2, step=3))
    if disturbed:
        workers.append(worker(1, 200, 2, "promoted"))
        struck = {"index": 0, "spec": "sigkill:rank=1@step=4", "kind": "sigkill", "rank": 1, "step": 4}
        (folder / "injections").mkdir(parents=True)
        write_lines(
            folder / "injections" / "0.json",
            [{**struck, "point": "collective", "pid": 101, "monotonic_s": 5, "wall_s": 1e9 + 5}],
        )
        done = {
            "rollback_step": 3,
            "rollback_generation": 1,
            "lost_steps": 0,
            "source": "replica",
            "seconds": 0.8,
        }
        begin = {
            "kind": "worker_exit",
            "ranks": [1],
            "host": "h1",
            "subject": "h1-a",
            "reason": "rank 1 was killed",
        }
        events += [
            event("recovery.begin", 5.1, 2, **begin),
            event("recovery.phase", 5.2, 2, phase="abort", seconds=0.1),
            event("recovery.phase", 5.3, 2, phase="abort", seconds=0.2, rank=0),
            event("recovery.phase", 5.5, 2, phase="fetch", seconds=0.3),
            event("view.published", 5.6, 2, phase="running", slots="h0-a,h2-a", reason="recovered"),
            event("recovery.done", 5.9, 2, **done),
        ]
        events.append(event("snapshot.degraded", 5.3, 2, reason="rank 1 has no replica"))
    events.append(event("run.finished", 9, exit_code=0, reason="all ranks finished"))
    events.sort(key=lambda line: float(line["wall_s"]))
    write_lines(folder / "events-h0-a.jsonl", events[::2])
    write_lines(folder / "events-h1-a.jsonl", events[1::2])
    for member in {line["member"] for line in workers}:
        write_lines(
            folder / f"workers-{member}.jsonl", [line for line in workers if line["member"] == member]
        )
    return folder


def record(rank: int, step: int, generation: int) -> dict[str, Any]:
    return {
        "g": generation,
        "s": step,
        "n": "loss",
        "d": "float32",
        "sh": [],
        "b": f"{rank:02x}{step:02x}0000",
    }


def worker(rank: int, pid: int, generation: int, role: str) -> dict[str, Any]:
    head = {"member": f"h{rank}-a", "rank": rank, "pid": pid}
    return {**head, "generation": generation, "monotonic_s": float(generation), "role": role}


class FakeAgent:
    """Answers one kind of question on a control port, as an agent does."""

    def __init__(self, token: str, status: AgentStatus) -> None:
        self._token = token
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._status = status
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            channel: Channel[StatusRequest] = Channel(sock, StatusRequest, CONTROL_FRAME_BYTES)
            with contextlib.closing(channel), contextlib.suppress(ChannelClosed):
                if channel.receive().token == self._token:
                    channel.send(StatusReply(body=msgspec.msgpack.encode(self._status)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port that takes connections and never answers, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
