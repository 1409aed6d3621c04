"""A small real megatron-core GPT, trained as Megatron's own loop would train it, on a GPU or on CPUs over gloo.

The demo and each Megatron cell of the matrix train it, with different `GptOptions`.
"""

from __future__ import annotations

import importlib
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from holdfast.chaos import drill
from holdfast.hook import InMemorySnapshot

HIDDEN, HEADS, VOCABULARY, SEQUENCE = 64, 4, 128, 32
MICRO_BATCH, MICRO_BATCHES = 2, 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GptOptions:
    """The features of Megatron that the job uses.

    Attributes:
        tensor, pipeline, virtual, sequence: tensor and pipeline parallel sizes; number of pipeline chunks on each rank;
            whether sequence parallelism is used.
        experts, expert_parallel, expert_tensor: experts per layer (0: dense); parallel sizes of the experts.
        expert_bias: balance experts by a bias that is updated every step, not by a loss.
        expert_capacity: tokens for each expert, as a multiple of its even share, padded or dropped; 0: no limit.
        dtype: ``bf16``, ``fp16`` (with a loss scale that overflows now and then) or ``fp32``.
        distributed: use the distributed optimizer, with `instances` of it in the data-parallel group.
        overlap: reduce gradients and gather parameters while other layers compute.
        llama: rotary positions, SwiGLU, RMSNorm, grouped queries, Megatron's own causal mask.
        muon: Muon steps the matrices, and Adam the rest; `layer_wise`: each rank steps whole layers.
        layout: place layers in the buffers of the distributed optimizer, which gathers them; needs megatron-core 0.19.
        offload: the fraction of the parameters that the CPU steps; `offload_overlap`: each has its own optimizer.
        aware: use the precision-aware optimizer, with ``fp32``, ``bf16`` or ``fp16`` moments; ``remainders``: keep the
            bits that 16-bit weights lack instead of main parameters.
        fp8: 8-bit weights, with this recipe of Transformer Engine: ``delayed``, ``tensorwise`` or ``mxfp8``.
    """

    tensor: int = 2
    pipeline: int = 1
    virtual: int | None = None
    sequence: bool = False
    experts: int = 0
    expert_parallel: int = 1
    expert_tensor: int | None = None
    expert_bias: bool = False
    expert_capacity: float = 0.0
    dtype: str = "bf16"
    distributed: bool = True
    instances: int = 1
    overlap: bool = False
    recompute: bool = False
    tied: bool = False
    llama: bool = False
    layers: int = 2
    dropout: float = 0.1
    muon: bool = False
    layer_wise: bool = False
    layout: bool = False
    offload: float | None = None
    offload_overlap: bool = False
    aware: str = ""
    fp8: str = ""


class Gpt:
    """`chaos.drill.Job`: one rank of the GPT."""

    def __init__(self, seed: int, **options: Any) -> None:
        self._seed = seed
        self._options = GptOptions(**options)
        initialise(self._options, seed)
        self.chunks, self.optim, self.scheduler = build(self._options, self.complete)

    def complete(self, options: GptOptions, chunks: list[Any]) -> None:
        """Make what the options need beyond Megatron, which is installed here."""

    def protect(self, **options: Any) -> InMemorySnapshot:
        return InMemorySnapshot(self.chunks, self.optim, scheduler=self.scheduler, **options)

    def step(self, step: int, middle: Callable[[], None]) -> float | None:
        """Train one step; return the loss averaged over microbatches and data-parallel ranks, on the last pipeline
        stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optim.zero_grad()
        data = [batches(self._seed, step) for _ in self.chunks]
        one = len(self.chunks) == 1
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward_step, mask=not self._options.llama, middle=middle),
            data_iterator=data[0] if one else data,
            model=self.chunks[0] if one else self.chunks,
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
        for c, chunk in enumerate(self.chunks):
            for name, module in chunk.named_modules():
                for way, scaling in getattr(module, "fp8_meta", {}).items():
                    yield from ((f"module{c}.{name}.{way}.{key}", each) for key, each in vars(scaling).items())
        for i, part in enumerate(parts(self.optim)):
            for p, scales in enumerate(getattr(part.optimizer, "_scales", {}).values()):
                yield f"optim{i}.scales{p}", sorted((key, each.item()) for key, each in scales.items())
            yield from drill.optimizer(part.optimizer, f"optim{i}")
            for g, group in enumerate(part.optimizer.param_groups):
                yield from ((f"optim{i}.group{g}.main{p}", main) for p, main in enumerate(group["params"]))
            if getattr(part, "grad_scaler", None) is not None:
                yield f"optim{i}.scaler", sorted((k, str(v)) for k, v in part.grad_scaler.state_dict().items())
        yield "scheduler", sorted(self.scheduler.state_dict().items())
        yield from drill.generators()
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
            yield f"tracker.{name}", state


def parts(optim: Any) -> Iterator[Any]:
    """The optimizers in a chain, which may itself contain chains."""
    for each in getattr(optim, "chained_optimizers", []):
        yield from parts(each) if hasattr(each, "chained_optimizers") else (each,)


def initialise(options: GptOptions, seed: int) -> None:
    """Create Megatron's process groups, and seed all generators as its own ``initialize_megatron`` does."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=options.expert_tensor,
        num_distributed_optimizer_instances=options.instances,
        distributed_timeout_minutes=2,
    )
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build(
    options: GptOptions, complete: Callable[[GptOptions, list[Any]], None] = lambda options, chunks: None
) -> tuple[list[DistributedDataParallel], Any, OptimizerParamScheduler]:
    """Model chunks, their optimizer and its schedule, as Megatron-LM's ``setup_model_and_optimizer`` makes them.

    `complete` is called with the chunks before they are wrapped.
    """
    if torch.cuda.is_available() and dist.get_backend() == "gloo":
        share_gpu()
    config = _config(options)
    chunks: list[Any] = [_chunk(config, options, stage).to(drill.place()) for stage in range(options.virtual or 1)]
    if options.dtype != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    complete(options, chunks)
    overlap_gather = options.overlap and (options.distributed or options.layer_wise)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=options.distributed or options.layout,
        num_distributed_optimizer_instances=options.instances,
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=overlap_gather,
        bucket_size=20_000 if options.overlap else None,
        fp8_param_gather=bool(options.fp8),
        reuse_grad_buf_for_mxfp8_param_ag=options.fp8 == "mxfp8",
    )
    chunks = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0, **_layout(options, ddp, chunk))
        for i, chunk in enumerate(chunks)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    if options.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    optim = _optimizer(options, chunks, overlap_gather)
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


def _layout(options: GptOptions, ddp: DistributedDataParallelConfig, chunk: torch.nn.Module) -> dict[str, Any]:
    """The argument that says where layers lie in the buffers, as Megatron-LM 0.19 computes it; empty if not wanted."""
    if not options.layout:
        return {}
    layer_wise = importlib.import_module("megatron.core.optimizer.layer_wise_optimizer")
    layer_wise.tag_params_for_buffer_routing([chunk])
    made = layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(chunk.parameters()), ddp.bucket_size, mpu.get_data_parallel_world_size(with_context_parallel=True), ddp
    )
    return {"full_param_layout": made}


def _optimizer(options: GptOptions, chunks: list[Any], overlap_gather: bool) -> Any:
    more: dict[str, Any] = {}
    if options.offload is not None:
        more |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": options.offload,
            "overlap_cpu_optimizer_d2h_h2d": options.offload_overlap,
            "use_precision_aware_optimizer": True,
            "pin_cpu_grads": False,
            "pin_cpu_params": False,
        }
    if options.aware:
        moments = DTYPES.get(options.aware, torch.bfloat16)
        more |= {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": moments,
            "exp_avg_sq_dtype": moments,
            "main_params_dtype": moments if moments is torch.float16 else torch.float32,
            "store_param_remainders": options.aware == "remainders",
        }
    if options.fp8:
        more |= {"fp8_recipe": options.fp8, "reuse_grad_buf_for_mxfp8_param_ag": options.fp8 == "mxfp8"}
    if options.muon:
        more |= {"muon_tp_mode": "duplicated"}
    config = OptimizerConfig(
        optimizer="adam" if not options.muon else "dist_muon" if options.layer_wise else "muon",
        lr=1e-3,
        min_lr=1e-5,
        weight_decay=0.1,
        bf16=options.dtype == "bf16",
        fp16=options.dtype == "fp16",
        params_dtype=DTYPES[options.dtype],
        use_distributed_optimizer=options.distributed,
        overlap_param_gather=overlap_gather,
        clip_grad=1.0,
        initial_loss_scale=2.0**18,
        loss_scale_window=3.0,
        **more,
    )
    if not options.muon:
        return get_megatron_optimizer(config, chunks)
    muon = importlib.import_module("megatron.core.optimizer.muon")
    return muon.get_megatron_muon_optimizer(
        config, chunks, config_overrides={}, layer_wise_distributed_optimizer=options.layer_wise
    )


def _config(options: GptOptions) -> TransformerConfig:
    more: dict[str, Any] = {}
    if options.experts:
        more |= {
            "num_moe_experts": options.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none" if options.expert_bias else "aux_loss",
            "moe_aux_loss_coeff": 0.0 if options.expert_bias else 1e-2,
            "moe_router_enable_expert_bias": options.expert_bias,
            "moe_router_score_function": "sigmoid" if options.expert_bias else "softmax",
            "moe_ffn_hidden_size": 2 * HIDDEN,
            "expert_model_parallel_size": options.expert_parallel,
            "expert_tensor_parallel_size": options.expert_tensor,
        }
    if options.expert_capacity:
        more |= {
            "moe_expert_capacity_factor": options.expert_capacity,
            "moe_pad_expert_input_to_capacity": True,
        }
    if options.llama:
        more |= {
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "num_query_groups": HEADS // 2,
        }
    if options.recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN,
        attention_dropout=options.dropout,
        hidden_dropout=options.dropout,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual,
        sequence_parallel=options.sequence,
        bf16=options.dtype == "bf16",
        fp16=options.dtype == "fp16",
        params_dtype=DTYPES[options.dtype],
        pipeline_dtype=DTYPES[options.dtype],
        add_bias_linear=not (options.experts or options.llama),
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **more,
    )


def _chunk(config: TransformerConfig, options: GptOptions, stage: int) -> GPTModel:
    """The layers of one virtual stage, with embedding and head where they belong."""
    virtual: dict[str, Any] = {"vp_stage": stage} if options.virtual else {}
    norm = "RMSNorm" if options.llama else None
    spec = get_gpt_layer_local_spec(num_experts=options.experts or None, moe_grouped_gemm=False, normalization=norm)
    if options.sequence:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
        count = options.layers // options.pipeline // (options.virtual or 1)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=_Norm)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=not options.virtual, **virtual),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=not options.virtual, **virtual),
        share_embeddings_and_output_weights=options.tied,
        position_embedding_type="rope" if options.llama else "learned_absolute",
        **virtual,
    )
    for parameter in gpt.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return gpt


class _Norm(torch.nn.LayerNorm):
    """LayerNorm whose gradients are summed over the tensor-parallel ranks; Megatron's own needs Apex for that."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def batches(seed: int, step: int) -> Iterator[Batch]:
    """This rank's microbatches of `step`: a pure function of seed, step and data-parallel rank."""
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for micro in range(MICRO_BATCHES):
        first = ((step * MICRO_BATCHES + micro) * replicas + replica) * MICRO_BATCH
        rows = [_sample(seed, index) for index in range(first, first + MICRO_BATCH)]
        tokens = torch.from_numpy(np.stack(rows)).to(drill.place())
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_step(
    data: Iterator[Batch], model: Any, *, mask: bool, middle: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, Any]:
    """Run one microbatch, as Megatron's schedules call it. `mask`: pass a causal mask; otherwise Megatron makes one."""
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
