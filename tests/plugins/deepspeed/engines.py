"""Small engines of every kind, on loopback."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deadpool.plugins import deepspeed
from deadpool.snapshot.stateful import TrainingState, collect
from tests.plugins.deepspeed.loopback import Script, world

WIDTH = 24
SIZE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What an engine is configured with."""

    stage: int
    dtype: str = "bf16"
    accumulate: int = 1
    overlap: bool = True
    gradients: str = ""  # type in which they are accumulated, if not the model's
    is_contiguous: bool = True  # gradients are copied into a buffer before they are reduced
    bucket: int = 1500  # elements that are reduced at once
    is_checkpointed: bool = False  # blocks are run again in the backward
    is_manual: bool = False  # backward is called on the scaled loss, not on the engine
    stages: int = 1  # of a pipeline
    fused: bool = False  # DeepSpeed's own Adam, which is exact on GPUs only

    def __str__(self) -> str:
        parts = [f"stage{self.stage}", self.dtype, f"x{self.accumulate}"]
        parts += ["overlap"] * self.overlap + [f"{self.gradients}-gradients"] * bool(self.gradients)
        parts += ["manual"] * self.is_manual + ["checkpointed"] * self.is_checkpointed
        parts += ["scattered"] * (not self.is_contiguous) + [f"bucket{self.bucket}"] * (self.bucket != 1500)
        return "-".join(parts + [f"pp{self.stages}"] * (self.stages > 1))


def cases(kinds: Sequence[Kind], *by_default: int) -> list[Any]:
    """`kinds` as parameters of a test; those that are not named by their index are long cases."""
    return [
        pytest.param(kind, id=str(kind), marks=() if index in by_default else pytest.mark.full)
        for index, kind in enumerate(kinds)
    ]


class Block(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            checkpoint(self.feed, x, use_reentrant=False) if self.is_checkpointed else self.feed(x)
        )
        return result

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return fed


def make_model(is_checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    first = Block(is_checkpointed)
    first.norm.weight.requires_grad = False  # a frozen parameter is state, too
    return nn.Sequential(nn.Embedding(16, WIDTH), first, Block(), nn.Linear(WIDTH, 16))


def make_config(kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": kind.accumulate,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": not kind.fused}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}},
        "zero_optimization": {
            "stage": kind.stage,
            "overlap_comm": kind.overlap,
            "contiguous_gradients": kind.is_contiguous,
            "reduce_bucket_size": kind.bucket,
            "allgather_bucket_size": 1500,
            "stage3_prefetch_bucket_size": 0 if kind.is_checkpointed else 1500,
            "stage3_param_persistence_threshold": 30,
            "sub_group_size": 1000,
        },
        "bf16": {"enabled": kind.dtype == "bf16"},
        "fp16": {"enabled": kind.dtype == "fp16", "initial_scale_power": 8},
    }
    if kind.gradients:
        config["data_types"] = {"grad_accum_dtype": kind.gradients}
    return config


class Trainer:
    """An engine and its steps; the data is a function of the step."""

    def __init__(self, kind: Kind, script: Script) -> None:
        self.kind, self.script = kind, script
        model: Any = make_model(kind.is_checkpointed)
        deepspeed.init_distributed(verbose=False)
        if kind.stages > 1:
            model = deepspeed.PipelineModule(list(model), num_stages=kind.stages, loss_fn=_loss)
        params = [param for param in model.parameters() if param.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=make_config(kind))
        torch.manual_seed(5)

    @functools.cached_property
    def state(self) -> TrainingState:
        """What `wrap` would protect; collected at the first use."""
        return collect({"engine": self.engine})

    def step(self, number: int) -> float:
        """One optimizer step; returns its last loss."""
        batches = _batches(number, self.kind.accumulate)
        if self.kind.stages > 1:
            return float(self.engine.train_batch(data_iter=batches))
        loss = torch.zeros(())
        for text, targets in batches:
            loss = _loss(self.engine(text.to(self.engine.device)), targets.to(self.engine.device))
            if self.kind.is_manual:
                self.engine.scale(loss).backward()
            else:
                self.engine.backward(loss)
            self.engine.step()
        return loss.item()


@contextmanager
def trainer(kind: Kind, *, size: int = SIZE) -> Iterator[Trainer]:
    """An engine of `kind` as rank 0 of a loopback world (of a pipeline: in its first stage)."""
    with world(0, 4 if kind.stages > 1 else size) as script:
        yield Trainer(kind, script)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _batches(number: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for micro in range(count):
        generator = torch.Generator().manual_seed(100 * number + micro)
        text = torch.randint(16, (2, 5), generator=generator)
        yield text, text.roll(1)
