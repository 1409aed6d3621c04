"""megatron-core: model chunks and its optimizers, distributed or not.

Captured in place: main parameters, moments, frozen parameters, buffers, scaler, schedule, every random generator.
Not captured: weights in 16 bits and fewer. They are made from the main parameters, which is checked once, bit for bit,
and are made again on restore. Between steps they may not even be current: with overlapped parameter gathering only each
rank's own part of them is.

``optimizer.load_state_dict`` is never used: with torch's AdamW, Megatron's gives all parameters one shared step counter
there, and training continues with wrong bias corrections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from holdfast.integrations.adapters.megatron_optimizers import (
    HybridState,
    casts,
    check_captured,
    check_quantized_anew,
    check_quantizes,
    check_weights,
    copy_to_weights,
    gathers_before_casting,
    holds_gradients,
    is_divided,
    is_quantized,
    layer_wise,
    parts,
    state_of,
    stepped,
)
from holdfast.integrations.adapters.releases import warn_of_untried
from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.tensors import set_dtype
from holdfast.snapshot.state.adapter import Adapter, buffers, check_modules, parameter_names, warn_of_unnamed
from holdfast.snapshot.state.live import Change, LiveTensor, Look, Stateful, Tree

TRIED = ("0.16", "0.19")
"""Releases with which every kind of job was killed, restored and compared."""


class MegatronAdapter(Adapter):
    """For megatron-core 0.16 to 0.19."""

    def __init__(
        self,
        model: Any,
        optim: Any,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        extra: Mapping[str, Stateful | None] | None = None,
    ) -> None:
        self._optimizer = optim
        self._parts: list[Any] = parts(optim)
        warn_of_untried("megatron-core", megatron.core.__version__, TRIED)
        chunks = check_modules(model)
        check_captured(optim, chunks)
        self._layer_wise = layer_wise(optim)
        self._chunks: list[Any] = list(chunks)
        self._verified = False
        alone = {id(part) for each in self._layer_wise for part in parts(each)}
        self._replicated = [not is_divided(part) and id(part) not in alone for part in self._parts]
        weights = parameter_names(chunks)
        check_weights(weights)
        if any(map(is_quantized, weights)):
            check_quantizes(optim)
        states = [
            state_of(part, f"optim{i}", replicated=self._replicated[i], weights=weights)
            for i, part in enumerate(self._parts)
        ]
        super().__init__(model, states, scheduler, extra)
        warn_of_unnamed(states)

    def coordinate(self) -> str:
        return (
            f"pp{mpu.get_pipeline_model_parallel_rank()}-tp{mpu.get_tensor_model_parallel_rank()}"
            f"-cp{mpu.get_context_parallel_rank()}-ep{mpu.get_expert_model_parallel_rank()}"
            f"-dp{mpu.get_data_parallel_rank()}"
        )

    def replica_set(self) -> str:
        """The ranks that differ only in their data-parallel place."""
        return self.coordinate().rpartition("-dp")[0]

    def optimizers(self) -> Sequence[Any]:
        return [self._optimizer]

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        return [each for state in self._states if isinstance(state, HybridState) for each in state.inside]

    def tensors(self) -> Iterator[LiveTensor]:
        for prefix, chunk in self._of_modules():
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad:
                    yield LiveTensor(f"{prefix}.{name}", parameter, Change.STEP, replicated=True)
            yield from buffers(chunk, prefix)
        for i, state in enumerate(self._states):
            updated = state.updated()
            for name, main in state.parameters():
                of, copy = updated[f"optim{i}.{name}"], stepped(state.optimizer, main)
                yield LiveTensor(f"optim{i}.{name}.main", copy, Change.STEP, self._replicated[i], of.block)
            yield from state.tensors()
        yield from self._tracked_tensors()

    def early(self) -> Tree:
        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
        generators = {
            name: tensor_parallel.random.convert_cuda_rng_state(state, to_graphable=False)
            for name, state in tracker.items()
        }
        return super().early() | {"tracker": generators}

    def look(self) -> Look:
        found = super().look()

        def late() -> Tree:
            held = [getattr(part, "grad_scaler", None) for part in self._parts]
            scalers = [scaler.state_dict() if scaler else None for scaler in held]
            return found.late() | {"scaler": scalers}

        return Look(found.fixed, late)

    def verify(self) -> None:
        super().verify()
        self._verify_quantized()
        for part in self._parts:
            for name, weight, main in casts(part):
                _check_cast(name, weight, main)
        for state in self._states:
            if isinstance(state, HybridState):
                names = {parameter: name for name, parameter in state.parameters()}
                for parameter, copy in state.copies():
                    _check_cast(names[parameter], parameter, copy)

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        super().materialise({name: leaf for name, leaf in leaves.items() if not name.endswith(".main")})
        for i, chunk in enumerate(self._modules):
            for name, buffer in chunk.named_buffers():
                leaf = leaves.get(f"model{i}.{name}")
                if leaf is not None and name.endswith(".expert_bias"):
                    set_dtype(buffer, leaf)  # 16 bits wide when built, 32 from the first forward on

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        schedulers: list[Any] = list(self.schedules)
        for scheduler in schedulers:
            if hasattr(scheduler, "num_steps"):
                scheduler.num_steps = 0  # Megatron's load_state_dict adds to num_steps
        for part, scaler in zip(self._parts, late["scaler"], strict=True):
            if scaler is not None:
                part.grad_scaler.load_state_dict(scaler)
        super().load(early, late, fixed)
        self._derive()
        self.rewinding(early)()

    def rewinding(self, early: Tree) -> Callable[[], None]:
        ours, tracker = super().rewinding(early), early["tracker"]

        def rewind() -> None:
            ours()
            live = tensor_parallel.get_cuda_rng_tracker()
            live.set_states({name: _put_back(live.get_states().get(name), state) for name, state in tracker.items()})

        return rewind

    def _verify_quantized(self) -> None:
        """Check once that quantizing gives the weights again.

        Only weights whose main parameters this rank has are quantized; these are always current. MXFP8 weights are
        gathered before they are quantized, in the memory of the gradients, so they are checked when there are none.
        """
        quantized = {weight: name for weight, name in parameter_names(self._modules).items() if is_quantized(weight)}
        gathered = [chunk for chunk in self._chunks if any(map(gathers_before_casting, self._parts))]
        if not quantized or self._verified or any(holds_gradients(chunk) for chunk in gathered):
            return

        def quantize() -> None:
            for part in self._parts:
                copy_to_weights(part)
            for chunk in gathered:
                chunk.start_param_sync(force_sync=True)

        check_quantized_anew(quantized, quantize)
        self._verified = True

    def _derive(self) -> None:
        """Make the model's weights from the main parameters, as ``optimizer.step()`` does."""
        for part in self._parts:
            copy_to_weights(part)
        for each in self._layer_wise:
            if not getattr(each, "use_buffer_param_sync", False):  # otherwise the buffers have its layers, too
                each.allgather_params()
        for chunk in self._chunks:
            if getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
                chunk.start_param_sync(force_sync=True)


def _put_back(generator: Any, state: torch.Tensor) -> Any:
    """What the tracker keeps of a generator, restored. A `torch.Generator`, which CUDA graphs use, is set in place."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
        return generator
    return state.clone()  # a copy, because draws change this very tensor


def _check_cast(name: str, weight: torch.Tensor, main: torch.Tensor) -> None:
    """Raises `StateMismatch` unless the weight is the cast of its main parameter, bit for bit."""
    if not torch.equal(weight.view(torch.uint8), main.detach().to(weight.dtype).view(torch.uint8)):
        raise StateMismatch(f"{name}: the model's weight is not the cast of its main parameter")
