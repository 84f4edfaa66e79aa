"""Train a byte-level GPT with megatron-core on the Python standard library's own sources.

Protected, four hosts as 2 pipeline stages x 2 data-parallel replicas, and a spare, on this machine:
    deadpool run --standalone --nnodes 4 --spares 1 examples/megatron_gpt.py --pp 2
The data-parallel size is the number of ranks / (tp x pp). Without a GPU, megatron-core runs on the CPU,
through `deadpool.testing.megatron_cpu`.

What protection asks of a script is marked with "DeadPool:".
"""

from __future__ import annotations

import argparse
import logging
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deadpool

warnings.filterwarnings("ignore", module=r"megatron\.core")  # each of its modules says that Apex is missing
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # older names

if not torch.cuda.is_available():
    print("no GPU: megatron-core runs on the CPU, through deadpool.testing.megatron_cpu", flush=True)
    from deadpool.testing import megatron_cpu

    megatron_cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402  # after the stand-in for the device
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from deadpool.plugins import megatron  # noqa: E402

SEED = 1234
LAYERS = 4
HEADS = 4
WIDTH = 64
CONTEXT = 32  # bytes
MICRO_BATCH = 2  # windows
MICRO_BATCHES = 4  # per step and replica
VOCABULARY = 256  # every byte
PEAK_LR = 5e-3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Windows:
    """Microbatches of text, [MICRO_BATCH, CONTEXT + 1]; each replica reads its own part, in shuffled order.

    DeadPool: the position is state. Iterating begins there.
    """

    def __init__(self, replica: int, replicas: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.replica, self.replicas = replica, replicas
        self.position = 0  # microbatches taken

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            number = self.position * self.replicas + self.replica
            generator = torch.Generator().manual_seed(SEED + number)
            starts = torch.randint(len(self.text) - CONTEXT - 1, (MICRO_BATCH,), generator=generator)
            self.position += 1
            yield torch.stack([self.text[start : start + CONTEXT + 1].long() for start in starts.tolist()])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def build_config(arguments: argparse.Namespace) -> TransformerConfig:
    dtype = DTYPES[arguments.dtype]
    on_device = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=arguments.tp,
        pipeline_model_parallel_size=arguments.pp,
        virtual_pipeline_model_parallel_size=arguments.vpp if arguments.vpp > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=arguments.dtype == "bf16",
        fp16=arguments.dtype == "fp16",
        hidden_dropout=0.1,
        attention_dropout=0.1,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not on_device,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def build_model(config: TransformerConfig, arguments: argparse.Namespace) -> list[DistributedDataParallel]:
    """One module per virtual pipeline stage of this rank."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=arguments.optimizer == "distributed",
        overlap_grad_reduce=arguments.overlap,
        overlap_param_gather=arguments.overlap and arguments.optimizer == "distributed",
        bucket_size=50_000 if arguments.overlap else None,
    )
    chunks = []
    for stage in range(arguments.vpp):
        virtual = {"vp_stage": stage} if arguments.vpp > 1 else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=CONTEXT,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            share_embeddings_and_output_weights=True,
            **virtual,
        )
        if torch.cuda.is_available():
            model.cuda()
        if arguments.dtype != "fp32":
            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=stage > 0))
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


def build_optimizer(chunks: list[DistributedDataParallel], arguments: argparse.Namespace) -> tuple[Any, Any]:
    config = OptimizerConfig(
        optimizer="adam",
        lr=PEAK_LR,
        min_lr=PEAK_LR / 10,
        weight_decay=0.1,
        clip_grad=1.0,
        params_dtype=DTYPES[arguments.dtype],
        bf16=arguments.dtype == "bf16",
        fp16=arguments.dtype == "fp16",
        initial_loss_scale=2.0**12,
        use_distributed_optimizer=arguments.optimizer == "distributed",
        overlap_param_gather=arguments.overlap and arguments.optimizer == "distributed",
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=arguments.gloo_groups)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=PEAK_LR,
        min_lr=PEAK_LR / 10,
        lr_warmup_steps=3,
        lr_decay_steps=max(4, arguments.steps),
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=arguments.steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def forward_step(data_iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    windows = next(data_iterator).to(torch.cuda.current_device())
    positions = torch.arange(CONTEXT, device=windows.device).expand(MICRO_BATCH, CONTEXT)
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool, device=windows.device).triu(1)
    output = model(windows[:, :-1].contiguous(), positions, mask, labels=windows[:, 1:].contiguous())

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with megatron-core.")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, help="virtual stages per pipeline stage")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--optimizer", choices=("distributed", "replicated"), default="distributed")
    parser.add_argument("--gloo-groups", action="store_true", help="and groups on gloo, as Megatron-LM has")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args(argv)
    if min(arguments.tp, arguments.pp, arguments.vpp, arguments.steps) < 1:
        parser.error("--tp, --pp, --vpp and --steps must be at least 1")
    if arguments.vpp > 1 and arguments.pp == 1:
        parser.error("--vpp needs --pp of at least 2")
    return arguments


def initialize(arguments: argparse.Namespace) -> None:
    """Megatron's groups, microbatch calculator and generators, as Megatron-LM sets them up."""
    parallel_state.initialize_model_parallel(
        arguments.tp,
        arguments.pp,
        arguments.vpp if arguments.vpp > 1 else None,
        create_gloo_process_groups=arguments.gloo_groups,
    )
    replicas = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(
        rank=dist.get_rank(),
        rampup_batch_size=None,
        global_batch_size=MICRO_BATCH * MICRO_BATCHES * replicas,
        micro_batch_size=MICRO_BATCH,
        data_parallel_size=replicas,
    )
    seed = SEED + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


class Trainer:
    """Model, optimizer and scheduler of one rank, and an iteration on them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        config = build_config(arguments)
        self.chunks = build_model(config, arguments)
        self.optimizer, self.scheduler = build_optimizer(self.chunks, arguments)
        self._model: Any = self.chunks if len(self.chunks) > 1 else self.chunks[0]
        self._run_schedule = get_forward_backward_func()
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if arguments.overlap:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def step(self, data_iterator: Any) -> dict[str, float]:
        """One iteration; the loss is known on the last pipeline stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run_schedule(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=self._model,
            num_microbatches=get_num_microbatches(),
            seq_length=CONTEXT,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        is_updated, norm, _ = self.optimizer.step()
        if is_updated:  # with fp16 the first steps find a loss scale that fits
            self.scheduler.step(increment=1)
        values = {"norm": float(norm)} if is_updated else {}
        if losses:
            values["loss"] = sum(each["loss"].item() for each in losses) / len(losses)
        return values


def main() -> None:
    arguments = parse_arguments()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    deadpool.init()  # DeadPool: instead of init_process_group
    initialize(arguments)
    trainer = Trainer(arguments)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def train_step(data_iterator: Any) -> dict[str, float]:
        values = trainer.step(data_iterator)
        protected.record(**values)  # DeadPool: kept bit for bit, for `deadpool verify`
        return values

    # DeadPool: every object with state is named here.
    protected = megatron.wrap_step(
        train_step, trainer.chunks, trainer.optimizer, trainer.scheduler, data=Windows(replica, replicas)
    )
    speaks = replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    with protected:  # DeadPool: left once all ranks have finished
        for step in range(1, arguments.steps + 1):
            values = protected()  # DeadPool: None for steps that were done before this process came
            if speaks and values and "loss" in values and step % 8 == 0:
                print(f"step {step}: loss {values['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
