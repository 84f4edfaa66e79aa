"""Train a byte-level GPT on the Python standard library's own sources, on CPU.

Protected, three hosts and a spare on this machine:
    deadpool run --standalone --nnodes 3 --spares 1 examples/train_gpt.py --parallel fsdp2
Unprotected, as one plain process:
    python examples/train_gpt.py

What protection asks of a script is marked with "DeadPool:".
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import deadpool
from deadpool.api import Ft

warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13

SEED = 1234
LAYERS = 4
HEADS = 4
WIDTH = 128
CONTEXT = 32  # bytes
BATCH = 2  # windows per rank and micro-batch; small, because few CPUs multiply bfloat16 natively
VOCABULARY = 256  # every byte
PEAK_LR = 2e-3
MAX_GRAD_NORM = 1.0


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


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:  # [batch, time] -> [batch, time, vocabulary]
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Windows(Dataset[Tensor]):
    """The sources, cut into windows of CONTEXT bytes and the byte after."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text = torch.frombuffer(
            bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()


class ShuffledForever(Sampler[int]):
    """Every pass over the data is a new shuffle, dealt out to the ranks in turn; the passes never end.

    DeadPool: the position is state. The loader saves it with `state_dict` and begins there again.
    """

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self.size, self.rank, self.world_size = size, rank, world_size
        self.position = 0  # samples that this rank has drawn

    def __iter__(self) -> Iterator[int]:
        per_pass = self.size // self.world_size
        while True:
            number, begin = divmod(self.position, per_pass)
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(SEED + number))
            for index in order[self.rank :: self.world_size][begin:per_pass].tolist():
                self.position += 1
                yield index

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class LossHistory:
    """Losses by step. DeadPool: as state, so that whoever is rank 0 at the end has the whole curve."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.losses = list(state["losses"])


class Lines:
    """Where no terminal is: each new state of the progress bar on a line of its own."""

    def write(self, text: str) -> None:
        text = text.strip()
        if text:
            sys.stderr.write(text + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(rank: int, done: int, total: int) -> tqdm[Any]:
    """The bar of one entry into `train`. DeadPool: after a recovery the next begins at the restored step."""
    on_terminal = sys.stderr.isatty()
    return tqdm(
        initial=done,
        total=total,
        unit="step",
        disable=rank != 0,
        file=None if on_terminal else Lines(),
        mininterval=0.1 if on_terminal else 1.0,
        ncols=None if on_terminal else 88,
        ascii=not on_terminal,
    )


def parallelize(model: GPT, parallel: str) -> nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def reduce_gradients(model: nn.Module, when: bool) -> AbstractContextManager[Any]:
    """Accumulate this micro-batch's gradients locally, or reduce them across the ranks."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(when)
        return nullcontext()
    assert isinstance(model, DistributedDataParallel)
    return nullcontext() if when else model.no_sync()


def mixed_precision(model: nn.Module) -> AbstractContextManager[Any]:
    """Autocast for DDP; FSDP2 casts by its own policy."""
    return nullcontext() if isinstance(model, FSDPModule) else torch.autocast("cpu", torch.bfloat16)


def learning_rate_factor(step: int, total: int) -> float:
    """Warm up over the first tenth, then half a cosine down to a tenth."""
    warmup = max(1, total // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, total - warmup))


def sample(state: dict[str, Any], prompt: bytes, count: int) -> str:
    """Continue `prompt` by `count` bytes."""
    model = GPT().eval()
    model.load_state_dict(state)
    generator = torch.Generator().manual_seed(SEED)
    text = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(count):
            logits = model(text[:, -CONTEXT:])[:, -1]
            following = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=generator)
            text = torch.cat([text, following], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def plot(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT, loss of rank 0")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the standard library's sources.")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss as a PNG")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.grad_accum < 1 or arguments.num_workers < 0:
        parser.error("--steps and --grad-accum must be at least 1, --num-workers at least 0")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    deadpool.init()  # DeadPool: instead of init_process_group
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(SEED)  # the same parameters everywhere
    gpt = GPT()
    parameter_count = sum(parameter.numel() for parameter in gpt.parameters())
    model = parallelize(gpt, arguments.parallel)
    torch.manual_seed(SEED + rank)  # different dropout everywhere
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, arguments.steps))
    windows = Windows()
    loader = StatefulDataLoader(
        windows,
        batch_size=BATCH,
        sampler=ShuffledForever(len(windows), rank, world_size),
        num_workers=arguments.num_workers,
    )
    history = LossHistory()

    def train(ft: Ft) -> None:
        model.train()
        batches = iter(loader)
        with progress_bar(rank, ft.step, arguments.steps) as bar:
            for _ in ft.steps(arguments.steps):
                loss = torch.zeros(())
                for micro in range(arguments.grad_accum):
                    window = next(batches)
                    with reduce_gradients(model, when=micro == arguments.grad_accum - 1):
                        with mixed_precision(model):
                            logits = model(window[:, :-1])
                        share = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
                        share = share / arguments.grad_accum
                        share.backward()
                    loss += share.detach()
                nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                ft.record(loss=loss)  # DeadPool: kept bit for bit, for `deadpool verify`
                history.losses.append(loss.item())
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()

    if rank == 0:
        print(
            f"{parameter_count:,} parameters, {len(windows.text):,} bytes of text, "
            f"{world_size} ranks, {arguments.parallel}, {arguments.steps} steps",
            flush=True,
        )
    # DeadPool: returns once all ranks have finished; every object with state is named here.
    deadpool.wrap(
        train, model=model, optimizer=optimizer, data=loader, scheduler=scheduler, history=history
    )()

    state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )  # on rank 0; with FSDP2 all ranks take part
    if rank == 0:
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}; the model writes:")
        print(sample(state, b"def ", 160), flush=True)
        if arguments.plot:
            plot(history.losses, arguments.plot)
            print(f"loss curve: {arguments.plot}", flush=True)


if __name__ == "__main__":
    main()
