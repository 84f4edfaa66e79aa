"""What each configuration of the yardstick starts: its processes, their commands and environments.

plain, deadpool            DDP; nothing stored, and everything protected
plain_X, deadpool_X        X = fsdp2, sleep, fsdp2_sleep, idle: see train_deadpool.py
dcp_{sync|async}N[_disk]   torchrun restarts, torch.distributed.checkpoint every N steps
ftl_{sync|async}N          the same behind ft_launcher of nvidia-resiliency-ext
torchft[_tuned|_spare]     two replica groups; _spare: a third computes along
nvrx_{none|local|localasync|dcp}N[_tuned]   in-process restart of nvidia-resiliency-ext, 2 ranks + 1 reserve
lmresN[_restart]           lm-resiliency: 2 agents + 1 standby + a manager; _restart: torchrun's restart
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
BIN = Path(PYTHON).parent

SLEEP_S = 0.16
"""Stands for the compute of a step: what a plain step takes with nothing else running."""
IDLE_S = 15.0
"""A step so long that nearly nothing of what is sampled belongs to steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a configuration; the run ends when every main one has ended."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    is_main: bool = True


def processes_of(configuration: str, out: Path) -> list[Process]:
    """The processes of `configuration`; `out` is the folder of the run, made already."""
    family = next((name for name in _FAMILIES if re.match(rf"{name}(\d|_|$)", configuration)), None)
    if family is None:
        raise SystemExit(f"unknown configuration {configuration}; known are\n{__doc__}")
    return _FAMILIES[family](configuration, out)


def baseline_of(configuration: str) -> str:
    """The plain configuration that a configuration is compared with."""
    if configuration.startswith(("plain", "deadpool")):
        return configuration.replace("deadpool", "plain")
    return "plain"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _torchrun(script: str, workers: int, *options: str) -> list[str]:
    command = [PYTHON, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={workers}"]
    return [*command, "--monitor-interval=0.1", *options, str(HERE / script)]


def _checkpoints(name: str) -> dict[str, str]:
    """`dcp_async10` -> how and how often train_ddp.py saves."""
    found = re.search(r"_(sync|async)(\d+)", name)
    if found is None:
        raise SystemExit(f"{name}: expected sync or async and a number of steps")
    return {"CKPT": found[1], "EVERY": found[2]}


def _own_environment(name: str) -> dict[str, str]:
    compute_s = IDLE_S if "idle" in name else SLEEP_S if "sleep" in name else 0.0
    return {"PARALLEL": "fsdp2" if "fsdp2" in name else "ddp", "COMPUTE_S": str(compute_s)}


def _plain(name: str, out: Path) -> list[Process]:
    if name == "plain":
        return [Process(name="job", command=_torchrun("train_ddp.py", 2, "--standalone"))]
    command = _torchrun("train_deadpool.py", 2, "--standalone")
    return [Process(name="job", command=command, environment=_own_environment(name))]


def _deadpool(name: str, out: Path) -> list[Process]:
    command = [PYTHON, "-m", "deadpool", "run", "--standalone", "--nnodes", "2", "--spares", "1"]
    command += ["--run-dir", str(out / "deadpool"), "--events", str(out / "deadpool.jsonl")]
    if "idle" in name:
        command += ["--progress-timeout-s", str(10 * IDLE_S)]
    command += [str(HERE / "train_deadpool.py")]
    return [Process(name="job", command=command, environment=_own_environment(name))]


def _dcp(name: str, out: Path) -> list[Process]:
    command = _torchrun("train_ddp.py", 2, "--standalone", "--max-restarts=3")
    return [Process(name="job", command=command, environment=_checkpoints(name))]


def _ftl(name: str, out: Path) -> list[Process]:
    command = [PYTHON, str(HERE / "ftl_main.py"), "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command += ["--rdzv-id=job", "--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=10"]
    command += [str(HERE / "train_ddp.py")]
    return [Process(name="job", command=command, environment={**_checkpoints(name), "FT_CLIENT": "1"})]


def _torchft(name: str, out: Path) -> list[Process]:
    has_spare = "spare" in name
    is_tuned = has_spare or "tuned" in name
    port = free_port()
    lighthouse = [str(BIN / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--quorum_tick_ms", "100"]
    lighthouse += ["--min_replicas", "2" if has_spare else "1"]
    lighthouse += ["--join_timeout_ms", "2000" if is_tuned else "10000"]
    lighthouse += ["--heartbeat_timeout_ms", "1000"] if is_tuned else []
    environment = {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "MODE": "spare" if has_spare else "dynamic",
        "RUST_BACKTRACE": "0",
    }
    restarts = f"--max-restarts={0 if has_spare else 10}"
    replicas = []
    for replica in range(3 if has_spare else 2):
        address = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
        replicas.append(
            Process(
                name=f"replica{replica}",
                command=_torchrun("train_torchft.py", 1, restarts, *address),
                environment={**environment, "REPLICA": str(replica)},
            )
        )
    return [Process(name="lighthouse", command=lighthouse, is_main=False), *replicas]


def _nvrx(name: str, out: Path) -> list[Process]:
    found = re.match(r"nvrx_(none|local|localasync|dcp)(\d*)", name)
    if found is None:
        raise SystemExit(f"{name}: expected nvrx_{{none|local|localasync|dcp}}N")
    environment = {
        "CKPT": found[1].replace("localasync", "local_async"),
        "EVERY": found[2] or "1",
        "TUNED": "1" if "tuned" in name else "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "3",
    }
    command = [PYTHON, str(HERE / "train_nvrx.py")]
    return [
        Process(name=f"rank{rank}", command=command, environment={**environment, "RANK": str(rank)})
        for rank in range(3)
    ]


def _lmres(name: str, out: Path) -> list[Process]:
    found = re.fullmatch(r"lmres(\d+)(_restart)?", name)
    if found is None:
        raise SystemExit(f"{name}: expected lmresN or lmresN_restart")
    environment = {"EVERY": found[1]}
    if found[2]:
        command = _torchrun("train_lmres.py", 2, "--standalone", "--max-restarts=3")
        return [Process(name="job", command=command, environment=environment)]
    # The file store: over TCP its heartbeats share the client of blocking waits, which can deadlock.
    job = f"lmres-{free_port()}"
    rendezvous = str(out / "rendezvous")
    manager = [PYTHON, str(HERE / "lmres_manager.py"), rendezvous, job]
    processes = [Process(name="manager", command=manager, is_main=False)]
    for node in range(3):
        folder = out / f"node{node}"
        folder.mkdir(mode=0o700)
        machine_id = folder / "machine-id"
        machine_id.write_text(f"{os.getpid():08x}{node + 1:024x}\n")
        settings = (
            "store_type=file,read_timeout=120,lm_resiliency_poll_interval_ms=50,"
            f"lm_resiliency_heartbeat_timeout_ms=1000,lm_resiliency_restart_context_path={folder}/context.json"
        )
        command = [PYTHON, str(HERE / "lmres_torchrun.py"), "--nnodes=2:3", "--nproc-per-node=1"]
        command += ["--max-restarts=3", "--monitor-interval=0.1", "--local-addr=127.0.0.1"]
        command += ["--rdzv-backend=lm_resiliency", f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={job}"]
        command += [f"--rdzv-conf={settings}", str(HERE / "train_lmres.py")]
        where = {"LM_RESILIENCY_MACHINE_ID_PATH": str(machine_id)}
        processes.append(Process(name=f"node{node}", command=command, environment={**environment, **where}))
    return processes


_FAMILIES: dict[str, Callable[[str, Path], list[Process]]] = {
    "plain": _plain,
    "deadpool": _deadpool,
    "dcp": _dcp,
    "ftl": _ftl,
    "torchft": _torchft,
    "nvrx": _nvrx,
    "lmres": _lmres,
}
