"""megatron-core: model chunks and its optimizers, distributed or not.

Captured in place: main parameters, moments, frozen parameters, buffers, scaler, schedule, every random generator.
Not captured: 16-bit weights, which are casts of the main parameters (checked once, bit for bit) and are made again
on restore. Between steps they may not even be current: with overlapped parameter gathering only each rank's own
part of them is.

Never goes through ``optimizer.load_state_dict``: with torch's AdamW, Megatron's gives all parameters one shared step
counter there, and training goes on with wrong bias corrections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from holdfast.integrations.adapters.base import BaseAdapter, buffers, check_modules, parameter_names, warn_of_unnamed
from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.tensors import Block, set_dtype
from holdfast.snapshot.state.live import Change, LiveTensor, Stateful, Tree
from holdfast.snapshot.state.optimizers import OptimizerState

log = get_log(__name__)

CAST_TO = (torch.bfloat16, torch.float16)

TRIED = ("0.16", "0.19")
"""Releases whose every kind of job was killed, restored and compared."""

CAPTURED = ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer")
"""Optimizers, alone or in a chain, whatever torch optimizer they wrap."""

NOT_CAPTURED = {
    "LayerWiseDistributedOptimizer": "each rank steps whole layers and sends them to the others, which would keep the "
    "weights that they had before the restore; train without a layer-wise optimizer",
    "HybridDeviceOptimizer": "it keeps parameters of its own on the CPU, which would overwrite what was restored; "
    "train without --optimizer-cpu-offload",
}
"""Kinds of state that would be resumed wrong, by class, and why."""


class MegatronAdapter(BaseAdapter):
    """`snapshot.state.adapter.Adapter` for megatron-core 0.16 to 0.19."""

    def __init__(
        self,
        model: Any,
        optim: Any,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        extra: Mapping[str, Stateful | None] | None = None,
    ) -> None:
        self._optimizer = optim
        self._parts: list[Any] = [
            part
            for part in getattr(optim, "chained_optimizers", [optim])
            if not getattr(part, "is_stub_optimizer", False)
        ]
        warn_of_untried(megatron.core.__version__)
        chunks = check_modules(model)
        check_captured(optim, self._parts, chunks)
        self._replicated = [not hasattr(part, "shard_fp32_from_float16_groups") for part in self._parts]
        weights = parameter_names(chunks)
        states = []
        for i, part in enumerate(self._parts):
            shards = {main: block for _, main, block in _shards(part)}
            mains = {main: weights[weight] for weight, main in _mains(part) if weight in weights}
            states.append(
                OptimizerState(
                    part.optimizer,
                    f"optim{i}",
                    replicated=self._replicated[i],
                    names=weights | mains,
                    blocks=lambda main, shards=shards: shards.get(main),  # type: ignore[misc]
                )
            )
        super().__init__(model, states, scheduler, extra)
        warn_of_unnamed(states)

    def coordinate(self) -> str:
        return (
            f"pp{mpu.get_pipeline_model_parallel_rank()}-tp{mpu.get_tensor_model_parallel_rank()}"
            f"-cp{mpu.get_context_parallel_rank()}-ep{mpu.get_expert_model_parallel_rank()}"
            f"-dp{mpu.get_data_parallel_rank()}"
        )

    def replica_set(self) -> str:
        """The ranks that differ in their data-parallel place only."""
        return self.coordinate().rpartition("-dp")[0]

    def optimizers(self) -> Sequence[Any]:
        return [self._optimizer]

    def tensors(self) -> Iterator[LiveTensor]:
        for prefix, chunk in self._of_modules():
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad:
                    yield LiveTensor(f"{prefix}.{name}", parameter, Change.STEP, replicated=True)
            yield from buffers(chunk, prefix)
        for i, state in enumerate(self._states):
            updated = state.updated()
            for name, main in state.parameters():
                of = updated[f"optim{i}.{name}"]
                yield LiveTensor(f"optim{i}.{name}.main", main, Change.STEP, self._replicated[i], of.block)
            yield from state.tensors()
        yield from self._tracked_tensors()

    def early(self) -> Tree:
        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
        generators = {
            name: tensor_parallel.random.convert_cuda_rng_state(state, to_graphable=False)
            for name, state in tracker.items()
        }
        return super().early() | {"tracker": generators}

    def late(self) -> Tree:
        scalers = [scaler.state_dict() if scaler else None for scaler in map(_scaler, self._parts)]
        return super().late() | {"scaler": scalers}

    def verify(self) -> None:
        for part in self._parts:
            for name, weight, main in _casts(part):
                if weight.dtype not in CAST_TO:
                    raise ConfigError(
                        f"{name} is kept as {type(weight).__name__} of {weight.dtype}; it cannot be told whether it "
                        "is the cast of its main parameter: only 16-bit weights are captured so far, so train without "
                        "--fp8-param-gather"
                    )
                if not torch.equal(weight.view(torch.uint8), main.detach().to(weight.dtype).view(torch.uint8)):
                    raise StateMismatch(f"{name}: the model's weight is not the cast of its main parameter")

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        super().materialise({name: leaf for name, leaf in leaves.items() if not name.endswith(".main")})
        for i, chunk in enumerate(self._modules):
            for name, buffer in chunk.named_buffers():
                leaf = leaves.get(f"model{i}.{name}")
                if leaf is not None and name.endswith(".expert_bias"):
                    set_dtype(buffer, leaf)  # 16 bits wide when it is built, 32 from the first forward on

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        self._derive()
        schedulers: list[Any] = list(self._schedulers)
        for scheduler in schedulers:
            if hasattr(scheduler, "num_steps"):
                scheduler.num_steps = 0  # Megatron's load_state_dict adds to it
        for part, scaler in zip(self._parts, late["scaler"], strict=True):
            if scaler is not None:
                part.grad_scaler.load_state_dict(scaler)
        super().load(early, late, fixed)
        self.rewinding(early)()

    def rewinding(self, early: Tree) -> Callable[[], None]:
        ours, tracker = super().rewinding(early), early["tracker"]

        def rewind() -> None:
            ours()
            live = tensor_parallel.get_cuda_rng_tracker()
            live.set_states({name: _put_back(live.get_states().get(name), state) for name, state in tracker.items()})

        return rewind

    def _derive(self) -> None:
        """Make the model's weights from the main parameters, as ``optimizer.step()`` does."""
        for part in self._parts:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        chunks: list[Any] = list(self._modules)
        for chunk in chunks:
            if getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
                chunk.start_param_sync(force_sync=True)


def warn_of_untried(version: str) -> None:
    """Say so if nobody has tried this release."""
    if ".".join(version.split(".")[:2]) not in TRIED:
        log.warning(
            "megatron-core %s was never tried with holdfast: %s were, see docs/support.md", version, ", ".join(TRIED)
        )


def check_captured(optim: Any, parts: Sequence[Any], chunks: Sequence[Any]) -> None:
    """Raises `ConfigError` if there is state of a kind that would not come back, or nobody has tried."""
    for each in (optim, *parts, *(getattr(part, "optimizer", None) for part in parts)):
        for name, reason in NOT_CAPTURED.items():
            if name in _names(each):
                raise ConfigError(f"megatron-core's {name} is not captured: {reason}")
    for part in parts:
        if not _names(part) & set(CAPTURED):
            known = ", ".join(CAPTURED)
            raise ConfigError(f"{type(part).__name__} is no optimizer of megatron-core that is captured: {known} are")
    if any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in chunks):
        raise ConfigError(
            "Megatron-FSDP is not captured: it keeps weights, gradients and main parameters in buffers of its own; "
            "train without --use-megatron-fsdp, or with FSDP2"
        )


def _names(of: object) -> set[str]:
    """What its class, and those that it is made from, are called."""
    return {each.__name__ for each in type(of).__mro__}


def _mains(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, main parameter) where these are two tensors."""
    yield from ((weight, main) for weight, main, _ in _shards(part))
    if hasattr(part, "fp32_from_float16_groups"):
        for weights, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(weights, mains, strict=True)


def _shards(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, Block]]:
    """(weight, main parameter, which part of the flattened weight that is) of a distributed optimizer, as its ranks cut
    weights at any element and number the pieces anew; nothing of others, which are alike on all ranks."""
    if not hasattr(part, "shard_fp32_from_float16_groups"):
        return
    # An optimizer that is aware of precision has no main parameters: it steps the shards of the 16-bit weights.
    mains = [
        [shard if main is None else main for main, shard in zip(*groups, strict=True)]
        for groups in zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True)
    ]
    for weights, shards in ((part.model_float16_groups, mains), (part.model_fp32_groups, part.shard_fp32_groups)):
        for group, of_group in zip(weights, shards, strict=True):
            for weight, shard in zip(group, of_group, strict=True):
                if shard is not None:
                    piece = part._get_model_param_range_map(weight)["param"]
                    yield weight, shard, Block((weight.numel(),), (piece.start,))


def _put_back(generator: Any, state: torch.Tensor) -> Any:
    """What the tracker keeps of a generator, as it was. One that CUDA graphs know is put back in place."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
        return generator
    return state.clone()  # draws are made from this very tensor, and would change what is kept


def _scaler(part: Any) -> Any:
    return getattr(part, "grad_scaler", None)


def _casts(part: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, 16-bit weight, main parameter), flat and of equal length, for each weight that is not captured."""
    if hasattr(part, "shard_fp32_from_float16_groups"):
        for g, group in enumerate(part.model_float16_groups):
            for i, weight in enumerate(group):
                piece = part._get_model_param_range_map(weight)["param"]
                main = part.shard_fp32_from_float16_groups[g][i]
                if main is not None:
                    yield f"group {g} parameter {i}", weight.detach().view(-1)[piece.start : piece.end], main.view(-1)
    elif hasattr(part, "fp32_from_float16_groups"):
        for g, group in enumerate(part.float16_groups):
            for i, weight in enumerate(group):
                main = part.fp32_from_float16_groups[g][i]
                yield f"group {g} parameter {i}", weight.detach().reshape(-1), main.detach().reshape(-1)
