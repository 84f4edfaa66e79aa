"""Train a byte-level GPT with DeepSpeed on the Python standard library's own sources, on CPU or GPU.

Protected, three hosts and a spare on this machine:
    deadpool run --standalone --nnodes 3 --spares 1 examples/deepspeed_gpt.py --stage 3
A pipeline of two stages on four hosts:
    deadpool run --standalone --nnodes 4 --spares 1 examples/deepspeed_gpt.py --stage 1 --pp 2
Unprotected, as one plain process:
    python examples/deepspeed_gpt.py

The settings of DeepSpeed are in deepspeed_gpt.json; the flags override some. What protection asks of a script
is marked with "DeadPool:".
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported: it would warn that it guesses

import deadpool
from deadpool.api import Ft
from deadpool.plugins import deepspeed  # DeadPool: instead of `import deepspeed`

warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # DeepSpeed uses older names

SEED = 1234
LAYERS = 2
HEADS = 4
WIDTH = 64
CONTEXT = 32  # bytes
VOCABULARY = 256  # every byte


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:  # [batch, time] -> [batch, time, width]
        x: Tensor = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return x


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.project(attended))
        fed: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + fed


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] -> [batch, time, vocabulary]
        logits: Tensor = self.project(self.norm(x))
        return logits


class Windows:
    """Endless random windows of the sources, another sequence for each data-parallel rank.

    DeadPool: the position is state; an iterator begins there.
    """

    def __init__(self, batch_size: int, data_rank: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
        self.text = torch.frombuffer(
            bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
        )
        self.batch_size, self.data_rank = batch_size, data_rank
        self.position = 0  # batches that this rank has drawn

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(SEED + 1000 * self.position + self.data_rank)
            starts = torch.randint(len(self.text) - CONTEXT - 1, (self.batch_size,), generator=generator)
            windows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts.tolist()])
            self.position += 1
            yield windows[:, :-1].long(), windows[:, 1:].long()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The file, with what the flags say in its place."""
    config: dict[str, Any] = json.loads(arguments.config.read_text())
    zero = config["zero_optimization"]
    if arguments.stage is not None:
        zero["stage"] = arguments.stage
    if arguments.overlap_comm is not None:
        zero["overlap_comm"] = arguments.overlap_comm
    if arguments.dtype is not None:
        config["bf16"] = {"enabled": arguments.dtype == "bf16"}
    if arguments.grad_accum is not None:
        config["gradient_accumulation_steps"] = arguments.grad_accum
    return config


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with DeepSpeed.")
    default = Path(__file__).with_name("deepspeed_gpt.json")
    parser.add_argument("--config", type=Path, default=default, help="settings of DeepSpeed")
    parser.add_argument("--stage", type=int, choices=range(4), help="of ZeRO")
    parser.add_argument("--dtype", choices=("bf16", "fp32"))
    parser.add_argument("--grad-accum", type=int, help="micro-batches per step")
    parser.add_argument("--overlap-comm", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument(
        "--pp", type=int, default=1, help="stages of the pipeline; above 1 with --stage 0 or 1"
    )
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.pp < 1 or (arguments.grad_accum or 1) < 1:
        parser.error("--steps, --pp and --grad-accum must be at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    deadpool.init()  # DeadPool: first; DeepSpeed keeps a torch.distributed that is already initialised
    deepspeed.init_distributed(verbose=False)
    rank = torch.distributed.get_rank()

    torch.manual_seed(SEED)  # the same parameters everywhere
    layers = [Embedding(), *(Block() for _ in range(LAYERS)), Head()]
    model: nn.Module
    if arguments.pp > 1:
        model = deepspeed.PipelineModule(layers, num_stages=arguments.pp, loss_fn=loss_of)
    else:
        model = nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings(arguments)
    )
    torch.manual_seed(SEED + rank)  # different dropout everywhere
    data_rank = torch.distributed.get_rank(engine.data_parallel_group)
    windows = Windows(engine.train_micro_batch_size_per_gpu(), data_rank)

    def one_step(batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        if arguments.pp > 1:
            whole: Tensor = engine.train_batch(data_iter=batches)
            return whole
        total = torch.zeros(())
        count: int = engine.gradient_accumulation_steps()
        for _ in range(count):
            text, targets = next(batches)
            loss = loss_of(engine(text.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()  # updates with the last micro-batch
            total += loss.detach().cpu()
        return total / count

    def train(ft: Ft) -> None:  # DeadPool: may be entered again after a failure
        batches = iter(windows)
        for step in ft.steps(arguments.steps):
            loss = one_step(batches)
            ft.record(loss=loss)  # DeadPool: kept bit for bit, for `deadpool verify`
            if rank == 0 and step % 4 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)

    # DeadPool: returns once all ranks have finished; the engine holds model, optimizer and scheduler.
    deadpool.wrap(train, engine=engine, data=windows)()


if __name__ == "__main__":
    main()
