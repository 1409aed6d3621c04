"""torchtitan's debug model on CPUs, with its own ``torchtitan.train``: 0.2 or 0.3, whichever this Python has.

``python tools/real/torchtitan_run.py --out DIR [--ranks N] [--kills K --seed S] [--variant backward|workers] [--bare]``
validates every 3 steps, collects garbage every 2, writes checkpoints every 5, and uses FSDP2 with several ranks.
``backward``: optimizers run in the backward pass (0.2 only); ``workers``: two processes read data.

torchtitan needs a device; `on_cpus` makes that the CPU. In 0.3, FlexAttention has no backward on CPUs, so `debug` puts
back an attention that its model no longer offers. `on_cpus` adds a function that 0.3 uses and torch 2.13 lacks.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import runpy
import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from under_kills import Notes, generators, launch, options  # type: ignore[import-not-found]

NEW = version("torchtitan") >= "0.3"
WORDS = [f"word{i}" for i in range(20)]
ASKED = options(__doc__.splitlines()[0])


def on_cpus() -> None:
    """Make torchtitan run on CPUs. Call this before torchtitan is imported."""
    import torch
    import torch._utils
    import torch.distributed
    from torch.distributed.fsdp import FSDPModule

    dist: Any = torch.distributed
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: dist.distributed_c10d._set_pg_timeout(timeout, group)
    os.environ["LOCAL_RANK"] = "0"  # all ranks use the only device, the CPU
    divide = FSDPModule.set_gradient_divide_factor

    def summing(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = summing  # type: ignore[method-assign]


def seed_everything() -> None:
    """Seed the generators that torchtitan leaves unseeded, all except torch's, so that runs can be compared."""
    import numpy

    random.seed(1)
    numpy.random.seed(1)


def write_data(out: Path) -> None:
    """Write a word tokenizer, and texts of these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(10, 90))) for _ in range(160)]
    (out / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (out / "tokenizer").mkdir(exist_ok=True)
    ids = {word: i for i, word in enumerate(["<unk>", "<bos>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<bos>", "<eos>"])
    tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
    (out / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


def use_data(out: Path) -> None:
    from datasets import load_dataset  # type: ignore[import-not-found]
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    text_datasets.DATASETS["c4_test"] = DatasetConfig(
        path=str(out / "data.json"),
        loader=lambda path: load_dataset("json", data_files=path, split="train", cache_dir=str(out / "cache")),
        sample_processor=lambda sample: sample["text"],
    )


def listen(notes: Notes, steps: int) -> None:
    """Note the trainer's results and final state by wrapping torchtitan's functions, independently of holdfast."""
    if NEW:
        from torchtitan.components.checkpointer import CheckpointManager
    else:
        from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor

    trainers: list[Any] = []

    def seeing(init: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            trainer = kwargs["states"]["train_state"]
            trainers.append(trainer)
            trainer.forward_backward_step = noting(trainer, trainer.forward_backward_step)
            trainer.lr_schedulers.step = after(trainer, trainer.lr_schedulers.step)
            init(self, *args, **kwargs)

        return __init__

    def noting(trainer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            notes.note("loss", trainer.step, loss.item())
            return loss

        return stepping

    def after(trainer: Any, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(schedule)
        def scheduling() -> None:
            schedule()
            notes.step(trainer.step)

        return scheduling

    def logging(log: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(log)
        def logged(self: Any, step: int, *numbers: float, extra_metrics: dict[str, Any]) -> None:
            for name, number in zip(("mean", "largest", "gradients"), numbers, strict=True):
                notes.note(name, step, number)
            notes.note("since", step, self.ntokens_since_last_log)
            notes.note("readings", step, len(self.data_loading_times))
            notes.note("seen", step, float(extra_metrics["n_tokens_seen"]))
            log(self, step, *numbers, extra_metrics=extra_metrics)

        return logged

    def validated(log: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(log)
        def logged(self: Any, loss: float, step: int, *more: Any) -> None:
            notes.note("validation", step, loss)
            log(self, loss, step, *more)

        return logged

    def ending(close: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(close)
        def closing(self: Any) -> None:
            if trainers and trainers[-1].step == steps:
                notes.end(state_of(trainers[-1]))
            close(self)

        return closing

    CheckpointManager.__init__ = seeing(CheckpointManager.__init__)
    MetricsProcessor.log = logging(MetricsProcessor.log)
    MetricsProcessor.log_validation = validated(MetricsProcessor.log_validation)
    MetricsProcessor.close = ending(MetricsProcessor.close)


def state_of(trainer: Any) -> dict[str, Any]:
    optimizers = trainer.optimizers.optimizers
    return {
        "generators": generators(),  # first, as the rest may make an iterator
        "model": [dict(part.state_dict()) for part in trainer.model_parts],
        "moments": [[dict(o.state[p]) for g in o.param_groups for p in g["params"]] for o in optimizers],
        "options": [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers],
        "schedules": [vars(each)["last_epoch"] for each in trainer.lr_schedulers.schedulers],
        "rates": [each.get_last_lr() for each in trainer.lr_schedulers.schedulers],
        "trainer": trainer.state_dict(),
        "data": {key: unpacked(value) for key, value in trainer.dataloader.state_dict().items()},
        "since": trainer.metrics_processor.ntokens_since_last_log,
    }


def unpacked(value: Any) -> Any:
    return pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - this process has just packed it


def debug() -> Any:
    """The configuration of 0.3, chosen by ``--module torchtitan_run --config debug``."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for _, _, parent, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.validator.dataloader.dataset = "c4_test"
    config.optimizer.implementation = "foreach"
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a newer torch
    return config


def arguments(asked: Any) -> list[str]:
    out, workers = asked.out, "2" if asked.variant == "workers" else "0"
    same = {
        "training.local_batch_size": "2",
        "training.seq_len": "64",
        "training.steps": str(asked.steps),
        "training.gc_freq": "2",
        "metrics.log_freq": "4",
        "checkpoint.interval": "5",
        "debug.seed": "3",
    }
    new = {
        "module": "torchtitan_run",
        "config": "debug",
        "hf_assets_path": f"{out}/tokenizer",
        "dump_folder": f"{out}/dump",
        "dataloader.num_workers": workers,
        "validator.freq": "3",
        "validator.steps": "2",
    }
    old = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": f"{out}/tokenizer",
        "job.dump_folder": f"{out}/dump",
        "training.dataset": "c4_test",
        "training.dataloader.num_workers": workers,
        "optimizer.implementation": "foreach",
        "validation.dataset": "c4_test",
        "validation.seq_len": "64",
        "validation.local_batch_size": "2",
        "validation.freq": "3",
        "validation.steps": "2",
    }
    chosen = same | (new if NEW else old)
    found = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    if NEW:
        found += ["--training.disable_cuda_graphs", "--validator.enable", "--checkpoint.enable"]
        named = "holdfast.integrations.torchtitan.in_memory"
        return found if asked.bare else [*found, "--override.imports", named]
    found += ["--validation.enable", "--checkpoint.enable"]
    if asked.variant == "backward":
        found.append("--optimizer.early_step_in_backward")
    return found if asked.bare else [*found, "--job.custom_config_module", "holdfast.integrations.torchtitan_0_2"]


def work(asked: Any) -> None:
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1")
    sys.argv = ["torchtitan.train", *arguments(asked)]  # 0.2 reads them on import
    on_cpus()
    seed_everything()
    use_data(asked.out)
    listen(Notes(asked.out), asked.steps)
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    given = ASKED.parse_args()
    given.out = given.out.resolve()
    if given.worker:
        work(given)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        write_data(given.out)
        launch(Path(__file__).resolve(), given)
