"""The third-party scripts to run: how each is started, and the holdfast lines that its documentation page names."""

from __future__ import annotations

from pathlib import Path

from tools.real import data
from tools.real.edits import Edit
from tools.real.examples import EXAMPLES
from tools.real.public import PUBLIC
from tools.real.run import Run

HERE = Path(__file__).parent


MEGATRON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 24 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 3 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local "
    "--use-cpu-initialization --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --distributed-backend gloo --eval-interval 5 "
    "--eval-iters 1 --log-interval 1 --no-check-for-nan-in-loss-and-grad --distributed-timeout-minutes 10 "
    "--num-workers 0 --no-create-attention-mask-in-dataloader --split 90,8,2 --data-cache-path cache "
)


def megatron(version: str, name: str, what: str, options: str, python: str = "frameworks-3.11") -> Run:
    """Megatron-LM's ``pretrain_gpt.py``, run in its checkout."""
    return Run(
        name=f"{name}-{version}",
        framework="Megatron-LM",
        what=f"pretrain_gpt.py, {what}",
        script="{source}/pretrain_gpt.py",
        arguments=MEGATRON + options,
        page="docs/megatron-lm.md",
        checkout=f"Megatron-LM-{version}",
        ranks=2,
        launcher="-m holdfast.megatron_lm",
        first=("tools.real.megatron_on_cpu",),
        python=python,
        variables=(("PYTHONPATH", "{source}"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("TORCHDYNAMO_DISABLE", "1")),
    )


NANOGPT = Run(
    name="nanogpt",
    framework="nanoGPT",
    what="train.py, gradients accumulated, evaluation every 10",
    script="train.py",
    arguments="--dataset=words --device=cpu --compile=False --dtype=float32 --eval_interval=10 --eval_iters=3 "
    "--gradient_accumulation_steps=3 --batch_size=4 --block_size=32 --n_layer=2 --n_head=2 --n_embd=32 --dropout=0.2 "
    "--max_iters=60 --warmup_iters=5 --lr_decay_iters=60",
    page="docs/loops.md",
    checkout="nanoGPT",
    files=("train.py", "model.py", "configurator.py"),
    make=data.binaries,
    said=r"^(step|saving)",
    lines=(
        Edit(
            "train.py",
            "while True:",
            """
            from holdfast import InMemorySnapshot
            place = ("iter_num", "best_val_loss", "X", "Y")
            snap = InMemorySnapshot(model, optimizer, extra={"scaler": scaler})
            snap.track("place", get=lambda: {name: globals()[name] for name in place}, set=globals().update)
            with snap:
            """,
            until="""
            if iter_num > max_iters:
                break
            """,
        ),
        Edit("train.py", "while True:\n", "while True:\n    snap.begin()\n"),
    ),
)

MINGPT = Run(
    name="mingpt",
    framework="minGPT",
    what="projects/adder/adder.py",
    script="projects/adder/adder.py",
    arguments="--trainer.max_iters=60 --trainer.batch_size=16 --trainer.num_workers=2 --trainer.device=cpu",
    page="docs/loops.md",
    checkout="minGPT",
    files=("mingpt", "projects/adder/adder.py"),
    variables=(("PYTHONPATH", "{work}"),),
    said="score",
    lines=(
        Edit("mingpt/trainer.py", "import time", "import time\nfrom holdfast import InMemorySnapshot"),
        Edit(
            "mingpt/trainer.py",
            "data_iter = iter(train_loader)\nwhile True:",
            """
            with InMemorySnapshot(model, self.optimizer) as snap:
                self.iter_num, train_loader = snap.step, snap.data(train_loader)
            """,
            until="""
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break
            """,
        ),
    ),
)

CHARGPT = MINGPT._replace(
    name="mingpt-chars",
    what="projects/chargpt/chargpt.py",
    script="projects/chargpt/chargpt.py",
    arguments="--model.model_type=gpt-nano --data.block_size=32 --trainer.max_iters=60 --trainer.batch_size=8 "
    "--trainer.num_workers=0 --trainer.device=cpu",
    files=("mingpt", "projects/chargpt/chargpt.py"),
    make=data.characters,
    said="",
)

FSDP2 = Run(
    name="fsdp2",
    framework="PyTorch FSDP2",
    what="pytorch/examples, distributed/FSDP2/example.py",
    script="example.py",
    arguments="",
    page="docs/fsdp2.md",
    package="torch",
    checkout="pytorch-examples/distributed/FSDP2",
    files=("example.py", "model.py", "utils.py", "checkpoint.py"),
    ranks=2,
    fits=(
        Edit("example.py", "if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:  # on CPUs"),
        Edit(
            "example.py",
            "torch.distributed.init_process_group(backend=backend, device_id=device)",
            "torch.distributed.init_process_group(backend=backend)",
        ),
        Edit(  # otherwise layers start with uninitialized memory
            "example.py",
            "model.reset_parameters()",
            "model.reset_parameters()\nfor layer in model.layers:\n    layer.reset_parameters()",
        ),
        Edit("example.py", "batch_size = 32", "batch_size = 4"),
        Edit("example.py", "n_layers=10,", "n_layers=3,"),
        Edit("example.py", "dropout_p=0,", "dropout_p=0.1,"),
        Edit("example.py", "for _ in range(10):", "for _ in range(30):"),
    ),
    lines=(
        Edit("example.py", "import argparse", "import argparse\nfrom holdfast import InMemorySnapshot"),
        Edit(
            "example.py",
            "for _ in range(30):",
            "with InMemorySnapshot(model, optim) as snap:",
            until="optim.zero_grad()",
        ),
        Edit("example.py", "for _ in range(30):", "for _ in snap.steps(30):"),
    ),
)

LIGHTNING = Run(
    name="lightning",
    framework="Lightning",
    what="examples/pytorch/basics/transformer.py",
    script="transformer.py",
    arguments="",
    page="docs/lightning.md",
    package="lightning",
    checkout="pytorch-lightning/examples/pytorch/basics",
    files=("transformer.py",),
    make=data.wikitext,
    fits=(
        Edit(
            "transformer.py",
            "train_dataset, val_dataset, test_dataset = random_split(dataset, [n - 4000, 2000, 2000])",
            "train_dataset, val_dataset, test_dataset = random_split(dataset, [n - 200, 100, 100])",
        ),
        Edit(
            "transformer.py",
            "trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=20)",
            "trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=2)",
        ),
    ),
    lines=(
        Edit(
            "transformer.py",
            "import lightning as L",
            "import lightning as L\nfrom holdfast.integrations.lightning import InMemoryCallback",
        ),
        Edit(
            "transformer.py",
            "trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=2)",
            "trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=2, callbacks=[InMemoryCallback()])",
        ),
    ),
)

TRAINER = Run(
    name="trainer",
    framework="Hugging Face Trainer",
    what="examples/pytorch/language-modeling/run_clm.py, DDP",
    script="run_clm.py",
    arguments="--model_type gpt2 --config_overrides n_embd=32,n_layer=2,n_head=2,n_positions=64 --tokenizer_name ./tok "
    "--train_file text.txt --validation_file held.txt --block_size 32 --do_train --do_eval --eval_strategy steps "
    "--eval_steps 7 --logging_steps 3 --save_strategy no --num_train_epochs 2 --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --output_dir out --report_to none --use_cpu --ddp_backend gloo",
    page="docs/hugging-face.md",
    package="transformers",
    checkout="transformers/examples/pytorch/language-modeling",
    files=("run_clm.py",),
    ranks=2,
    make=data.words,
    needs=("accelerate", "datasets", "evaluate"),
    first=("tools.real.trainer_notes",),
    lines=(
        Edit(
            "run_clm.py", "import datasets", "from holdfast.integrations.huggingface import protect\n\nimport datasets"
        ),
        Edit(
            "run_clm.py",
            "# Training\nif training_args.do_train:",
            "protect(trainer)\n\n# Training\nif training_args.do_train:",
        ),
    ),
)

NO_TRAINER = Run(
    name="accelerate",
    framework="accelerate",
    what="transformers' run_clm_no_trainer.py, DDP",
    script="run_clm_no_trainer.py",
    arguments="--model_type gpt2 --tokenizer_name ./tok --train_file text.txt --validation_file held.txt "
    "--block_size 32 --num_train_epochs 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --seed 5 "
    "--output_dir out --num_warmup_steps 3",
    page="docs/hugging-face.md",
    package="accelerate",
    checkout="transformers/examples/pytorch/language-modeling",
    files=("run_clm_no_trainer.py",),
    ranks=2,
    make=data.words,
    needs=("transformers", "datasets"),
    variables=(("ACCELERATE_USE_CPU", "true"),),
    fits=(
        Edit(
            "run_clm_no_trainer.py",
            "config = CONFIG_MAPPING[args.model_type]()",
            "config = CONFIG_MAPPING[args.model_type](n_embd=32, n_layer=2, n_head=2, n_positions=64)",
        ),
        Edit(  # accelerate no longer has this type
            "run_clm_no_trainer.py",
            "if accelerator.distributed_type == DistributedType.TPU:",
            "if accelerator.distributed_type == DistributedType.XLA:",
        ),
    ),
    lines=(
        Edit(
            "run_clm_no_trainer.py",
            "import datasets",
            "from holdfast.integrations.accelerate import protect\n\nimport datasets",
        ),
        Edit(
            "run_clm_no_trainer.py",
            "for epoch in range(starting_epoch, args.num_train_epochs):",
            """
            with protect(accelerator) as snap:
                starting_epoch, completed_steps = snap.epoch, snap.step
            """,
            until="""
            if args.checkpointing_steps == "epoch":
                output_dir = f"epoch_{epoch}"
                if args.output_dir is not None:
                    output_dir = os.path.join(args.output_dir, output_dir)
                accelerator.save_state(output_dir)
            """,
        ),
        Edit(
            "run_clm_no_trainer.py",
            "for step, batch in enumerate(active_dataloader):",
            "for step, batch in enumerate(snap.data(active_dataloader)):",
        ),
    ),
)

TITAN = [
    Run(
        name=f"torchtitan-{version}{variant and '-'}{variant}",
        framework="torchtitan",
        what=f"its debug model{variant and ', '}{said}",
        page="docs/fsdp2.md",
        program="torchtitan_run.py",
        arguments=f"--variant={variant}" if variant else "",
        package="torchtitan",
        ranks=2,
        python=f"torchtitan-{version}-3.11",
    )
    for version, variant, said in (("0.2", "", ""), ("0.3", "", ""), ("0.2", "workers", "two processes read data"))
]

BRIDGE = Run(
    name="megatron-bridge",
    framework="Megatron-Bridge",
    what="its pretrain() of a small GPT, distributed optimizer",
    page="docs/megatron-lm.md",
    program="megatron_bridge_run.py",
    package="megatron-bridge",
    ranks=2,
    python="megatron-bridge-3.12",
)

DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

RUNS: tuple[Run, ...] = (
    megatron("0.16.1", "megatron", "DP 2, distributed optimizer", DISTRIBUTED),
    TRAINER,
    NO_TRAINER,
    megatron("0.16.1", "megatron-tp", "TP 2", "--tensor-model-parallel-size 2"),
    megatron("0.16.1", "megatron-pp", "PP 2", "--pipeline-model-parallel-size 2"),
    megatron("0.19.0", "megatron", "DP 2, distributed optimizer", DISTRIBUTED, "megatron-3.12"),
    NANOGPT,
    MINGPT,
    CHARGPT,
    FSDP2,
    LIGHTNING,
    *EXAMPLES,
    *PUBLIC,
    *(run for run in (*TITAN, BRIDGE) if (HERE / run.program).is_file()),
)
