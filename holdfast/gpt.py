"""The demo's job: a small real megatron-core GPT, trained on CPU over gloo as Megatron's own loop would train it.

Tensor parallel 2, the rest data parallel, distributed optimizer, bf16, dropout, two microbatches a step. Each trainer
reports the loss of every step and, at the end, a digest of all of its state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from integrations.megatron_cpu import install

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

from chaos.trainer import Trainer
from holdfast.hook import InMemorySnapshot
from smp_daemon.points import reach

TENSOR_PARALLEL = 2
LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE = 2, 64, 4, 128, 32
MICRO_BATCH, MICRO_BATCHES = 2, 2
DROPOUT = 0.1

Batch = tuple[torch.Tensor, torch.Tensor]


def train() -> None:
    """One rank, from process group to the last step. Arguments: ``seed``, ``steps``, ``snapshots``, ``protect``."""
    trainer = Trainer.from_environment()
    args = trainer.args
    torch.set_num_threads(1)
    trainer.init_process_group()
    mpu.initialize_model_parallel(tensor_model_parallel_size=TENSOR_PARALLEL, distributed_timeout_minutes=2)
    _seed_everything(args["seed"])
    model, optim, scheduler = build()
    with contextlib.ExitStack() as stack:
        first = 0
        if args["snapshots"]:
            snap = stack.enter_context(
                InMemorySnapshot(
                    [model], optim, scheduler=scheduler, protect=args["protect"], start=False, overhead_budget=0
                )
            )
            first = snap.step
            trainer.report(
                "started",
                step=first,
                how=snap.restored.how,
                bytes_fetched=snap.restored.bytes_fetched,
                clock=snap.restored.clock,
            )
        for step in range(first, args["steps"]):
            loss = train_step(model, optim, scheduler, args["seed"], step)
            trainer.report("step", step=step + 1, loss=loss.hex())
        trainer.report("end", digest=digest(model, optim, scheduler))
    dist.destroy_process_group()


def build() -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """The model, its optimizer and its schedule, as Megatron-LM's ``setup_model_and_optimizer`` makes them."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN,
        attention_dropout=DROPOUT,
        hidden_dropout=DROPOUT,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    )
    for parameter in gpt.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        Float16Module(config, gpt),
    )
    model.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    optim = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-5,
            weight_decay=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [model],
    )
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
    return model, optim, scheduler


def train_step(model: Any, optim: Any, scheduler: Any, seed: int, step: int) -> float:
    """One step; the loss, averaged over microbatches and data-parallel ranks."""
    model.zero_grad_buffer()
    optim.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, step=step + 1),
        data_iterator=batches(seed, step),
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    updated, _, _ = optim.step()
    if updated:
        scheduler.step(increment=1)
    return float(torch.stack([part["lm loss"] for part in losses]).mean())


def batches(seed: int, step: int) -> Iterator[Batch]:
    """This rank's microbatches of `step`: a pure function of seed, step and data-parallel rank."""
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for micro in range(MICRO_BATCHES):
        first = ((step * MICRO_BATCHES + micro) * replicas + replica) * MICRO_BATCH
        rows = [_sample(seed, index) for index in range(first, first + MICRO_BATCH)]
        tokens = torch.from_numpy(np.stack(rows))
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def digest(model: Any, optim: Any, scheduler: Any) -> str:
    """SHA-256 of everything that decides how training goes on, taken without holdfast's own code."""
    sha = hashlib.sha256()

    def add(name: str, tensor: torch.Tensor) -> None:
        sha.update(name.encode())
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    for name, parameter in model.named_parameters():
        add(name, parameter)
    for name, buffer in model.named_buffers():
        add(name, buffer)
    for part in optim.chained_optimizers:
        for index, group in enumerate(part.optimizer.param_groups):
            sha.update(repr(sorted((k, v) for k, v in group.items() if k != "params")).encode())
            for place, main in enumerate(group["params"]):
                add(f"main {index} {place}", main)
                for key, value in sorted(part.optimizer.state[main].items()):
                    add(f"{key} {index} {place}", value)
    sha.update(json.dumps(scheduler.state_dict(), sort_keys=True).encode())
    sha.update(repr((random.getstate(), np.random.get_state()[1].tobytes())).encode())  # type: ignore[index]
    add("torch", torch.get_rng_state())
    for name, state in sorted(tensor_parallel.get_cuda_rng_tracker().get_states().items()):
        add(name, state)
    return sha.hexdigest()


def _forward_step(data: Iterator[Batch], model: Any, *, step: int) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    positions = torch.arange(SEQUENCE).unsqueeze(0).expand_as(tokens)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), diagonal=1).bool()
    output = model(tokens, positions, mask, labels=labels)
    reach("train.step", step)
    return output, _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    average = loss.detach().clone()
    dist.all_reduce(average, group=mpu.get_data_parallel_group())
    return loss, {"lm loss": average / mpu.get_data_parallel_world_size()}


def _sample(seed: int, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An arithmetic sequence of tokens: easy to learn, so that the loss falls within a few steps."""
    generator = np.random.default_rng([seed, index])
    start, stride = generator.integers(0, VOCABULARY), generator.integers(1, 7)
    return np.asarray((start + stride * np.arange(SEQUENCE + 1)) % VOCABULARY, dtype=np.int64)


def _seed_everything(seed: int) -> None:
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
