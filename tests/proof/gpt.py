"""The GPT of `holdfast.chaos.gpt` with many more of Megatron's features, and stand-ins for packages that exist only for
GPUs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

# ruff: noqa: I001 - the first makes megatron importable without a GPU
from holdfast.chaos import drill, gpt
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.proof.standins import emerging, experts, fused_adam, gather, offload, quantized

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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


class FullGpt(gpt.Gpt):
    """A `Gpt` with these options, which may ask for any of the packages that stand-ins stand in for."""

    def __init__(self, seed: int, **options: Any) -> None:
        self._seed = seed
        self.options = GptOptions(**options)
        self.mask = not self.options.llama
        gpt.initialise(
            seed,
            self.options.tensor,
            pipeline_model_parallel_size=self.options.pipeline,
            virtual_pipeline_model_parallel_size=self.options.virtual,
            expert_model_parallel_size=self.options.expert_parallel,
            expert_tensor_parallel_size=self.options.expert_tensor,
            num_distributed_optimizer_instances=self.options.instances,
        )
        self.chunks, self.optim, self.scheduler = _build(self.options)

    def state(self) -> drill.State:
        yield from super().state()
        for c, chunk in enumerate(self.chunks):
            for name, module in chunk.named_modules():
                for way, scaling in getattr(module, "fp8_meta", {}).items():
                    yield from ((f"module{c}.{name}.{way}.{key}", each) for key, each in vars(scaling).items())
        for i, part in enumerate(gpt.parts(self.optim)):
            for p, scales in enumerate(getattr(part.optimizer, "_scales", {}).values()):
                yield f"optim{i}.scales{p}", sorted((key, each.item()) for key, each in scales.items())
            if getattr(part, "grad_scaler", None) is not None:
                yield f"optim{i}.scaler", sorted((k, str(v)) for k, v in part.grad_scaler.state_dict().items())


def _stand_in(options: GptOptions, chunks: list[Any]) -> None:
    """Install the stand-ins for what the options ask for beyond Megatron."""
    if options.experts and not torch.cuda.is_available():
        experts.install()
    if options.fp8:
        gather.one_by_one()
        for chunk in chunks:
            quantized.quantize_weights(chunk, options.fp8)
    if options.offload is not None or options.aware:
        fused_adam.install()
    if options.offload is not None:
        offload.install()
    if options.muon:
        emerging.install()
        gather.install()


def _build(options: GptOptions) -> tuple[list[Any], Any, Any]:
    """As `gpt.build`, with the options."""
    config = _config(options)
    chunks: list[Any] = [_chunk(config, options, stage) for stage in range(options.virtual or 1)]
    if options.dtype != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    _stand_in(options, chunks)
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
    if options.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    return gpt.finish(config, chunks, _optimizer(options, chunks, overlap_gather))


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
    config = gpt.optimizer_config(
        optimizer="adam" if not options.muon else "dist_muon" if options.layer_wise else "muon",
        bf16=options.dtype == "bf16",
        fp16=options.dtype == "fp16",
        params_dtype=DTYPES[options.dtype],
        use_distributed_optimizer=options.distributed,
        overlap_param_gather=overlap_gather,
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
    if options.experts and not torch.cuda.is_available():
        more |= {
            "num_moe_experts": options.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none" if options.expert_bias else "aux_loss",
            "moe_aux_loss_coeff": 0.0 if options.expert_bias else 1e-2,
            "moe_router_enable_expert_bias": options.expert_bias,
            "moe_router_score_function": "sigmoid" if options.expert_bias else "softmax",
            "moe_ffn_hidden_size": 2 * gpt.HIDDEN,
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
            "num_query_groups": gpt.HEADS // 2,
        }
    if options.recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return gpt.transformer(
        num_layers=options.layers,
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
        **more,
    )


def _chunk(config: TransformerConfig, options: GptOptions, stage: int) -> Any:
    """The layers of one virtual stage, with embedding and head where they belong."""
    virtual: dict[str, Any] = {"vp_stage": stage} if options.virtual else {}
    norm = "RMSNorm" if options.llama else None
    spec = get_gpt_layer_local_spec(num_experts=options.experts or None, moe_grouped_gemm=False, normalization=norm)
    if options.sequence:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
        count = options.layers // options.pipeline // (options.virtual or 1)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=_Norm)
    return gpt.model(
        config,
        spec,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=not options.virtual, **virtual),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=not options.virtual, **virtual),
        share_embeddings_and_output_weights=options.tied,
        position_embedding_type="rope" if options.llama else "learned_absolute",
        **virtual,
    )


class _Norm(torch.nn.LayerNorm):
    """LayerNorm whose gradients are summed over the tensor-parallel ranks; Megatron's own needs Apex for that."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
