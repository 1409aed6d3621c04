"""A small real megatron-core GPT, trained as Megatron's own loop would train it, on a GPU or on CPUs over gloo.

`tests.proof.gpt` trains it with more of Megatron's features.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.chaos.megatron_cpu import install, share_gpu

install()
warnings.filterwarnings("ignore", message=".*Apex.*")

# ruff: noqa: E402 - megatron asks for CUDA while it is imported
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from holdfast.chaos import drill
from holdfast.hook import InMemorySnapshot

HIDDEN, HEADS, VOCABULARY, SEQUENCE = 64, 4, 128, 32
MICRO_BATCH, MICRO_BATCHES = 2, 2

Batch = tuple[torch.Tensor, torch.Tensor]


class Gpt:
    """`chaos.drill.Job`: one rank of the GPT.

    Attributes:
        mask: whether it passes a causal mask; otherwise Megatron makes one.
    """

    mask = True

    def __init__(self, seed: int, tensor: int = 2, distributed: bool = True) -> None:
        """`tensor`: tensor parallel size; `distributed`: with the distributed optimizer."""
        self._seed = seed
        initialise(seed, tensor)
        self.chunks, self.optim, self.scheduler = build(tensor, distributed)

    def protect(self, **options: Any) -> InMemorySnapshot:
        return InMemorySnapshot(self.chunks, self.optim, scheduler=self.scheduler, **options)

    def step(self, step: int, middle: Callable[[], None]) -> float | None:
        """Train one step; return the loss averaged over microbatches and data-parallel ranks, on the last pipeline
        stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optim.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward_step, mask=self.mask, middle=middle),
            data_iterator=[batches(self._seed, step) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            decoder_seq_length=SEQUENCE,
            forward_only=False,
        )
        updated, _, _ = self.optim.step()
        if updated:
            self.scheduler.step(increment=1)
        return float(torch.stack([part["lm loss"] for part in losses]).mean()) if losses else None

    def state(self) -> drill.State:
        yield from drill.modules(*self.chunks)
        for i, part in enumerate(parts(self.optim)):
            yield from drill.optimizer(part.optimizer, f"optim{i}")
            for g, group in enumerate(part.optimizer.param_groups):
                yield from ((f"optim{i}.group{g}.main{p}", main) for p, main in enumerate(group["params"]))
        yield "scheduler", sorted(self.scheduler.state_dict().items())
        yield from drill.generators()
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
            yield f"tracker.{name}", state


def parts(optim: Any) -> Iterator[Any]:
    """The optimizers in a chain, which may itself contain chains."""
    for each in getattr(optim, "chained_optimizers", []):
        yield from parts(each) if hasattr(each, "chained_optimizers") else (each,)


def initialise(seed: int, tensor: int = 2, **sizes: Any) -> None:
    """Create Megatron's process groups, and seed all generators as its own ``initialize_megatron`` does.

    `sizes`: more arguments of ``initialize_model_parallel``.
    """
    mpu.initialize_model_parallel(tensor_model_parallel_size=tensor, distributed_timeout_minutes=2, **sizes)
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build(tensor: int = 2, distributed: bool = True) -> tuple[list[Any], Any, OptimizerParamScheduler]:
    """The model as one chunk, its optimizer and its schedule, as Megatron-LM's ``setup_model_and_optimizer`` makes
    them."""
    config = transformer(tensor_model_parallel_size=tensor)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunk = DistributedDataParallel(config, ddp, Float16Module(config, model(config)))
    optim = get_megatron_optimizer(optimizer_config(use_distributed_optimizer=distributed), [chunk])
    return finish(config, [chunk], optim)


def finish(config: TransformerConfig, chunks: list[Any], optim: Any) -> tuple[list[Any], Any, OptimizerParamScheduler]:
    """Make the replicas the same and tell Megatron's schedules of the optimizer; return all with a schedule."""
    if torch.cuda.is_available() and dist.get_backend() == "gloo":
        share_gpu()
    for chunk in chunks:
        chunk.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optim.scale_loss
    scheduler = OptimizerParamScheduler(
        optim,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=4,
        lr_decay_steps=100,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    return chunks, optim, scheduler


def optimizer_config(**more: Any) -> OptimizerConfig:
    """Adam in bf16; `more` arguments add to that, or replace it."""
    adam = {"optimizer": "adam", "bf16": True, "params_dtype": torch.bfloat16}
    return OptimizerConfig(**adam | {"lr": 1e-3, "min_lr": 1e-5, "weight_decay": 0.1, "clip_grad": 1.0} | more)


def transformer(**more: Any) -> TransformerConfig:
    """Two layers in bf16; `more` arguments add to that, or replace it."""
    ours: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": 4 * HIDDEN,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**ours | more)


def model(config: TransformerConfig, spec: Any = None, **more: Any) -> GPTModel:
    """The layers of one stage, by default all of them. `spec`, `more`: arguments of Megatron's ``GPTModel``."""
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec or get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        **more,
    ).to(drill.place())
    for parameter in gpt.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return gpt


def batches(seed: int, step: int) -> Iterator[Batch]:
    """This rank's microbatches of `step`: a pure function of seed, step and data-parallel rank."""
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for micro in range(MICRO_BATCHES):
        first = ((step * MICRO_BATCHES + micro) * replicas + replica) * MICRO_BATCH
        rows = [_sample(seed, index) for index in range(first, first + MICRO_BATCH)]
        tokens = torch.from_numpy(np.stack(rows)).to(drill.place())
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_step(
    data: Iterator[Batch], model: Any, *, mask: bool = True, middle: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, Any]:
    """Run one microbatch, as Megatron's schedules call it. `mask`: see `Gpt`."""
    tokens, labels = next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).unsqueeze(0).expand_as(tokens)
    square = torch.ones(1, 1, SEQUENCE, SEQUENCE, device=tokens.device)
    above = torch.triu(square, diagonal=1).bool() if mask else None
    output = model(tokens, positions, above, labels=labels)
    middle()
    return output, _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    average = loss.detach().clone()
    dist.all_reduce(average, group=mpu.get_data_parallel_group())
    return loss, {"lm loss": average / mpu.get_data_parallel_world_size()}


def _sample(seed: int, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An arithmetic sequence of tokens: easy to learn, so the loss falls within a few steps."""
    generator = np.random.default_rng([seed, index])
    start, stride = generator.integers(0, VOCABULARY), generator.integers(1, 7)
    return np.asarray((start + stride * np.arange(SEQUENCE + 1)) % VOCABULARY, dtype=np.int64)
