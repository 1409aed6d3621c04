"""Megatron-Bridge's own ``pretrain`` of a small GPT on CPUs.

``python tools/real/megatron_bridge_run.py --out DIR [--ranks N] [--kills K --seed S] [--bare]``: megatron-core's own
layers with dropout, bf16, the distributed optimizer, validation on shuffled data every 4 steps, mock data.

`on_cpus` makes it run without a GPU. It uses `holdfast.chaos.megatron_cpu` for megatron-core. Modules
that Megatron-Bridge imports but does not use here are replaced by empty ones: Transformer Engine's LoRA layers,
ModelOpt and Energon. Megatron-Bridge's package modules, which import all its models, are not executed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from under_kills import Notes, generators, launch, options  # type: ignore[import-not-found]

ASKED = options(__doc__.splitlines()[0])
EMPTY = ("modelopt", "megatron.energon", "megatron.bridge.peft.lora_layers")
PROVIDERS = {"GPTModelProvider": "gpt_provider", "T5ModelProvider": "t5_provider"}
NVRX_FOR_MEGATRON_CORE = "0.6.0"
"""A version that megatron-core accepts: it rejects older ones, but works without features that it does not find."""


class Nothing(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules in `EMPTY`, and all their submodules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == root or name.startswith(f"{root}.") for root in EMPTY):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def on_cpus() -> None:
    """Make Megatron-Bridge run on CPUs. Call this before Megatron-Bridge is imported."""
    import nvidia_resiliency_ext

    from holdfast.chaos import megatron_cpu

    nvidia_resiliency_ext.__version__ = NVRX_FOR_MEGATRON_CORE
    megatron_cpu.install()
    sys.meta_path.insert(0, Empty())
    spec = importlib.util.find_spec("megatron")
    folders = [
        Path(place) / "bridge" for place in ((spec.submodule_search_locations or ()) if spec is not None else ())
    ]
    folder = next(place for place in folders if place.is_dir())
    for name, place in {"megatron.bridge": folder, "megatron.bridge.models": folder / "models"}.items():
        package = ModuleType(name)
        package.__path__ = [str(place)]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    models: Any = sys.modules["megatron.bridge.models"]
    models.__getattr__ = lambda name: getattr(
        importlib.import_module(f"megatron.bridge.models.{PROVIDERS[name]}"), name
    )
    distill: Any = importlib.import_module("modelopt.torch.distill.plugins.megatron")
    distill.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
    importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
    datasets: Any = importlib.import_module("megatron.core.datasets.utils")
    datasets.compile_helpers = lambda: None  # an installed megatron-core contains them
    setup: Any = importlib.import_module("megatron.bridge.training.setup")
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    setup.set_jit_fusion_options = lambda *args: None  # compiles for a GPU
    cuda: Any = importlib.import_module("torch").cuda
    cuda.device_count = lambda: 1
    cuda.set_device = cuda.reset_peak_memory_stats = lambda *args: None
    cuda.memory_stats = lambda *args: {}
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args: 0)


def configuration(asked: Any) -> Any:
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as c
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return c.ConfigContainer(
        model=GPTModelProvider(
            transformer_layer_spec=lambda config: get_gpt_layer_local_spec(),
            num_layers=2,
            hidden_size=64,
            ffn_hidden_size=128,
            num_attention_heads=4,
            seq_length=32,
            vocab_size=128,
            make_vocab_size_divisible_by=64,
            attention_dropout=0.1,
            hidden_dropout=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            cross_entropy_loss_fusion=False,
        ),
        train=c.TrainingConfig(
            train_iters=asked.steps, global_batch_size=4 * asked.ranks, micro_batch_size=2, exit_signal_handler=False
        ),
        validation=c.ValidationConfig(eval_interval=4, eval_iters=2),
        optimizer=c.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=1.0
        ),
        scheduler=c.SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=asked.steps,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=c.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        ),
        dataset=c.MockGPTDatasetConfig(
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=32,
            num_dataset_builder_threads=1,
            data_sharding=True,
            dataloader_type="single",
            num_workers=0,
            persistent_workers=False,
            pin_memory=False,
        ),
        logger=c.LoggerConfig(log_interval=1),
        tokenizer=c.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=c.CheckpointConfig(save=None, load=None),
        rng=c.RNGConfig(seed=5),
        dist=c.DistributedInitConfig(distributed_backend="gloo"),
    )


def work(asked: Any) -> None:
    random.seed(1)
    on_cpus()
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    notes = Notes(asked.out)

    class Listening(Callback):  # type: ignore[misc, unused-ignore]
        """Notes the results and the final state, independently of holdfast."""

        def on_train_step_end(self, context: Any) -> None:
            step = context.state.train_state.step + 1
            for name, loss in context.loss_dict.items():
                notes.note(name.replace(" ", "-"), step, loss.item())
            notes.note("gradients", step, context.grad_norm)
            notes.step(step)

        is_over = False  # the evaluation after training repeats the last step's

        def on_eval_end(self, context: Any) -> None:
            if self.is_over:
                return
            for name, loss in context.total_loss_dict.items():
                notes.note(f"validation-{name.replace(' ', '-')}", context.state.train_state.step, loss.item())

        def on_train_end(self, context: Any) -> None:
            self.is_over = True
            notes.end(state_of(context))

    callbacks: list[Callback] = [Listening()]
    if not asked.bare:
        from holdfast.integrations.megatron_bridge import BridgeCallback

        callbacks.insert(0, BridgeCallback())
    pretrain(configuration(asked), forward_step, callbacks=callbacks)


def state_of(context: Any) -> dict[str, Any]:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    parts = getattr(context.optimizer, "chained_optimizers", [context.optimizer])
    machine = get_rerun_state_machine()
    return {
        "generators": generators(),
        "model": [dict(chunk.named_parameters()) for chunk in context.model],
        "buffers": [dict(chunk.named_buffers()) for chunk in context.model],
        "mains": [[group["params"] for group in part.optimizer.param_groups] for part in parts],
        "moments": [[dict(state) for state in part.optimizer.state.values()] for part in parts],
        "schedule": context.scheduler.state_dict(),
        "counters": {name: str(value) for name, value in vars(context.state.train_state).items()},
        "reruns": {name: str(getattr(machine, name)) for name in ("current_iteration", "state", "max_values")},
    }


if __name__ == "__main__":
    given = ASKED.parse_args()
    given.out = given.out.resolve()
    if given.worker:
        work(given)
    else:
        launch(Path(__file__).resolve(), given)
