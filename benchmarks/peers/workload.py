"""One small GPT training job that every configuration imports: CPU, gloo, one thread, fixed seed.

Events are JSON lines appended to RUN_DIR/events.jsonl (O_APPEND, one write per line):
  {"t": unix time, "ev": ..., "pid":, "rank":, ...}
 ev=proc   : process start (t = kernel start time of the pid), written right after imports
 ev=import : torch and the peer's own imports are done
 ev=mark   : a named milestone ("name")
 ev=step   : finished optimizer step ("step", counted from 1; "dt", "loss", "world", "cpu")
 ev=kill   : written by the victim right before it kills itself
 ev=final  : digest of this rank's parameters and optimizer moments

Fault injection: KILL_STEP=k, KILL_RANK=r: rank r kills itself between forward and backward of step k, once
per run (marker file). All ranks of a run share RUN_DIR.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

RUN_DIR = os.environ.get("RUN_DIR", "/tmp/run")
STEPS = int(os.environ.get("STEPS", "40"))
KILL_STEP = int(os.environ.get("KILL_STEP", "0"))
KILL_RANK = int(os.environ.get("KILL_RANK", "1"))
WIDTH, HEADS, VOCABULARY = 256, 4, 8192
LAYERS = int(os.environ.get("LAYERS", "10"))
CONTEXT, BATCH = int(os.environ.get("SEQ", "128")), int(os.environ.get("BATCH", "1"))
SEED = 1234


def emit(ev: str, rank: int = -1, **fields: Any) -> None:
    """Append one event; `t=` gives it another time than now."""
    now = fields.pop("t", None) or time.time()
    if ev == "step":
        fields["cpu"] = time.process_time()  # of this process so far: robust against noisy neighbours
    line = json.dumps({"t": now, "ev": ev, "pid": os.getpid(), "rank": rank, **fields}) + "\n"
    fd = os.open(os.path.join(RUN_DIR, "events.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def setup_process(rank: int = -1) -> None:
    """One thread, deterministic kernels, and the two events of a process that is ready to build."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    emit("proc", rank, t=_process_start())
    emit("import", rank)


def _process_start() -> float:
    """Unix time at which the kernel started this process."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    with open("/proc/uptime") as file:  # finer than btime of /proc/stat
        up_s = float(file.read().split()[0])
    return time.time() - (up_s - ticks / os.sysconf("SC_CLK_TCK"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        parts = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, time] -> loss
        x = self.tok(tokens) + self.pos
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.tok.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def build(
    optimizer: type[torch.optim.AdamW] = torch.optim.AdamW, *, shard: bool = False
) -> tuple[nn.Module, torch.optim.AdamW]:
    """The model, sharded with FSDP2 if asked for, and its optimizer; the same on every rank."""
    torch.manual_seed(SEED)
    model = GPT()
    if shard:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model, optimizer(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def prime_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create AdamW's state without changing anything: some peers load into it in place."""
    for parameter in model.parameters():
        if not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def start_ddp(rank: int) -> tuple[nn.Module, torch.optim.AdamW, DistributedDataParallel]:
    """Join the default group of the launcher's environment, and build."""
    dist.init_process_group("gloo")
    emit("mark", rank, name="pg")
    model, optimizer = build()
    prime_optimizer(model, optimizer)
    ddp = DistributedDataParallel(model)
    emit("mark", rank, name="built")
    return model, optimizer, ddp


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [batch, time] of a step counted from 0: Zipf-like, a function of (step, rank)."""
    generator = torch.Generator().manual_seed(SEED + 1_000_003 * step + 7919 * rank)
    uniform = torch.rand(BATCH, CONTEXT + 1, generator=generator)
    tokens = (VOCABULARY**uniform - 1).long().clamp_(0, VOCABULARY - 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def maybe_kill(step: int, rank: int) -> None:
    """The fault; stands between forward and backward of `step`, counted from 1."""
    if not KILL_STEP or (step, rank) != (KILL_STEP, KILL_RANK):
        return
    try:
        os.close(os.open(os.path.join(RUN_DIR, "killed"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    emit("kill", rank, step=step)
    os.kill(os.getpid(), signal.SIGKILL)


def forward_backward(model: nn.Module, step: int, rank: int) -> Tensor:
    """Forward, the fault if this is its place, backward; `step` counts from 1."""
    loss = model(*batch(step - 1, rank))
    maybe_kill(step, rank)
    loss.backward()
    return loss


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over this rank's parameters and moments."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(_local_bytes(parameter))
    for parameter in model.parameters():
        for part in ("exp_avg", "exp_avg_sq"):
            digest.update(_local_bytes(optimizer.state[parameter][part]))
    return digest.hexdigest()[:16]


def _local_bytes(tensor: Tensor) -> bytes:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numpy().tobytes()
