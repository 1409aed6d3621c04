"""Public training scripts that need neither a hub nor a GPU: how each is made small, and our lines in it."""

from __future__ import annotations

from tools.real import data
from tools.real.edits import Edit
from tools.real.examples import ENVIRONMENT, IMPORT, MNIST
from tools.real.run import Run

COPY = Run(
    name="copy-task",
    framework="x-transformers",
    what="train_copy.py, generates every 10",
    script="train_copy.py",
    page="docs/loops.md",
    checkout="x-transformers",
    files=("train_copy.py", "x_transformers"),
    python=ENVIRONMENT,
    said="incorrects",
    fits=(
        Edit("train_copy.py", "NUM_BATCHES = int(1e5)", "NUM_BATCHES = 30"),
        Edit("train_copy.py", "BATCH_SIZE = 32", "BATCH_SIZE = 4"),
        Edit("train_copy.py", "GENERATE_EVERY  = 100", "GENERATE_EVERY  = 10"),
        Edit("train_copy.py", "dim = 128,", "dim = 32,"),
    ),
    lines=(
        Edit("train_copy.py", "import tqdm", f"{IMPORT}import tqdm"),
        Edit(
            "train_copy.py",
            "for i in tqdm.tqdm(range(NUM_BATCHES), mininterval=10., desc='training'):",
            "with InMemorySnapshot(model, optim) as snap:",
            until='print(f"incorrects: {incorrects}")',
        ),
        Edit(
            "train_copy.py",
            "for i in tqdm.tqdm(range(NUM_BATCHES), mininterval=10., desc='training'):",
            "for i in tqdm.tqdm(snap.steps(NUM_BATCHES), mininterval=10., desc='training'):",
        ),
    ),
)

GPT2 = Run(
    name="llm-c",
    framework="llm.c",
    what="train_gpt2.py, gradients accumulated, evaluation every 6",
    script="train_gpt2.py",
    arguments="--model d12 --input_bin train.bin --input_val_bin val.bin --batch_size 2 --sequence_length 16 "
    "--total_batch_size 64 --num_iterations 30 --warmup_iters 4 --learning_rate_decay_frac 0.1 --weight_decay 0.1 "
    "--val_loss_every 6 --val_max_steps 3 --overfit_single_batch 0 --write_tensors 0 --device cpu",
    page="docs/loops.md",
    checkout="llm.c",
    files=("train_gpt2.py",),
    make=data.shards,
    said="^val loss",
    fits=(
        Edit("train_gpt2.py", "import tiktoken", ""),
        Edit("train_gpt2.py", 'enc = tiktoken.get_encoding("gpt2")', "enc = None  # it would be downloaded"),
        Edit(
            "train_gpt2.py",
            '"d12": GPTConfig(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768),',
            '"d12": GPTConfig(block_size=64, vocab_size=128, n_layer=2, n_head=2, n_embd=32),',
        ),
    ),
    lines=(
        Edit("train_gpt2.py", "import math", f"{IMPORT}import math"),
        Edit(
            "train_gpt2.py",
            "for step in range(args.num_iterations + 1):",
            """
            snap = InMemorySnapshot(model, optimizer)
            place = vars(train_loader)
            snap.track("place", get=lambda: {"current_position": train_loader.current_position}, set=place.update)
            with snap:
            """,
            until="""
            if step > 0 and step > args.num_iterations - 20:
                timings.append(t1-t0)
            """,
        ),
        Edit(
            "train_gpt2.py",
            "for step in range(args.num_iterations + 1):",
            "for step in snap.steps(args.num_iterations + 1):",
        ),
    ),
)

SCHEDULE_FREE = MNIST._replace(
    name="schedule-free",
    framework="schedule_free",
    what="examples/mnist/main.py, weights exchanged for each evaluation",
    arguments="--no-cuda --no-mps --epochs 3 --batch-size 16 --test-batch-size 32 --log-interval 5",
    checkout="schedule_free/examples/mnist",
    lines=(
        MNIST.lines[0],
        Edit(
            "main.py",
            "for epoch in range(1, args.epochs + 1):",
            "with InMemorySnapshot(model, optimizer) as snap:",
            until="test(model, optimizer, device, test_loader)",
        ),
        *MNIST.lines[2:],
    ),
)

PPO = Run(
    name="ppo",
    framework="cleanrl",
    what="cleanrl/ppo.py, CartPole",
    script="ppo.py",
    arguments="--total-timesteps 1024 --num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-cuda",
    page="docs/loops.md",
    checkout="cleanrl/cleanrl",
    files=("ppo.py",),
    python=ENVIRONMENT,
    said="episodic_return",
    lines=(
        Edit("ppo.py", "import os", f"{IMPORT}import os\nimport pickle"),
        Edit(
            "ppo.py",
            "for iteration in range(1, args.num_iterations + 1):",
            """
            def game():
                held = {name: value for name, value in vars(envs).items() if name != "env_fns"}
                return pickle.dumps((held, global_step, next_obs, next_done))

            def play_on(game):
                global global_step, next_obs, next_done
                held, global_step, next_obs, next_done = pickle.loads(game)
                vars(envs).update(held)

            snap = InMemorySnapshot(agent, optimizer)
            snap.track("game", get=game, set=play_on)
            with snap:
            """,
            until='writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)',
        ),
        Edit(
            "ppo.py",
            "for iteration in range(1, args.num_iterations + 1):",
            "for iteration in range(snap.step + 1, args.num_iterations + 1):\n    snap.begin()",
        ),
    ),
)

DQN = PPO._replace(
    name="dqn",
    what="cleanrl/dqn.py, CartPole, a replay buffer and a target network",
    script="dqn.py",
    arguments="--total-timesteps 400 --buffer-size 200 --learning-starts 40 --target-network-frequency 50 "
    "--batch-size 16 --train-frequency 4 --no-cuda",
    files=("dqn.py",),
    variables=(("PYTHONPATH", "{source}/.."),),
    lines=(
        Edit("dqn.py", "import os", f"{IMPORT}import os\nimport pickle"),
        Edit(
            "dqn.py",
            "for global_step in range(args.total_timesteps):",
            """
            def game():
                return pickle.dumps(({name: value for name, value in vars(envs).items() if name != "env_fns"}, obs, rb))

            def play_on(game):
                global obs, rb
                held, obs, rb = pickle.loads(game)
                vars(envs).update(held)

            snap = InMemorySnapshot(q_network, optimizer)
            snap.track("game", get=game, set=play_on)
            snap.track("target", tensors=target_network)
            with snap:
            """,
            until="""
                args.tau * q_network_param.data + (1.0 - args.tau) * target_network_param.data
            )
            """,
        ),
        Edit(
            "dqn.py",
            "for global_step in range(args.total_timesteps):",
            "for global_step in snap.steps(args.total_timesteps):",
        ),
    ),
)

PARITY = Run(
    name="parity",
    framework="x-transformers",
    what="train_parity.py, a curriculum, Lion",
    script="train_parity.py",
    page="docs/loops.md",
    checkout="x-transformers",
    files=("train_parity.py", "x_transformers"),
    python=ENVIRONMENT,
    said="frac incorrect|criteria",
    fits=(
        Edit("train_parity.py", "BATCH_SIZE = 256", "BATCH_SIZE = 8"),
        Edit("train_parity.py", "EVAL_EVERY  = 500", "EVAL_EVERY  = 10"),
        Edit("train_parity.py", "EVAL_LENGTHS = (16, 32, 64, 128, 256, 512)", "EVAL_LENGTHS = (4, 8, 16)"),
        Edit("train_parity.py", "LOSS_THRES_INCREASE_LEN = 1e-3", "LOSS_THRES_INCREASE_LEN = 0.7"),
        Edit("train_parity.py", "MEET_CRITERIA_THRES_INCREASE_LEN = 10", "MEET_CRITERIA_THRES_INCREASE_LEN = 6"),
        Edit("train_parity.py", ").cuda()", ")"),
        Edit(
            "train_parity.py",
            "seq = torch.randint(0, 2, (BATCH_SIZE, length)).cuda()",
            "seq = torch.randint(0, 2, (BATCH_SIZE, length))",
        ),
        Edit("train_parity.py", "while train_seq_len < stop_length:", "while i < 40:"),
        Edit(
            "train_parity.py",
            "incorrects = (pred != labels[:, -1]).abs().sum().item()",
            "incorrects = (pred != labels[:, -1]).sum().item()",
        ),
    ),
    lines=(
        Edit("train_parity.py", "import tqdm", f"{IMPORT}import tqdm"),
        Edit(
            "train_parity.py",
            "with tqdm.tqdm(mininterval = 10., desc = 'training') as pbar:",
            """
            snap = InMemorySnapshot(model, optimizer)
            place = ("i", "meet_criteria", "train_seq_len")
            snap.track("place", get=lambda: {name: globals()[name] for name in place}, set=globals().update)
            with snap, tqdm.tqdm(mininterval = 10., desc = 'training') as pbar:
            """,
        ),
        Edit("train_parity.py", "while i < 40:", "while i < 40:\n    snap.begin()"),
    ),
)

TIMM = Run(
    name="timm",
    framework="timm",
    what="train.py, its own loader with two workers, mixup, an average of the weights",
    script="train.py",
    arguments="--data-dir images --model test_resnet --img-size 64 --num-classes 2 --batch-size 4 "
    "--validation-batch-size 4 --epochs 3 --warmup-epochs 1 --workers 2 --opt adamw --lr 1e-3 --mixup 0.2 --drop 0.1 "
    "--model-ema --model-ema-decay 0.9 --device cpu --output out --experiment here --log-interval 5",
    page="docs/loops.md",
    checkout="pytorch-image-models",
    files=("train.py", "timm"),
    make=data.pictures,
    python=ENVIRONMENT,
    first=("tools.real.torchvision_on_cpu",),
    said="Best metric",
    fits=(
        Edit(  # with holdfast workers are started anew for each pass, and what they draw is other than in one long life
            "timm/data/loader.py",
            "persistent_workers: bool = True,",
            "persistent_workers: bool = False,",
        ),
    ),
    lines=(
        Edit("train.py", "import argparse", f"{IMPORT}import argparse"),
        Edit(
            "train.py",
            "for epoch in range(start_epoch, num_epochs):",
            """
            def best(values):
                nonlocal best_metric, best_epoch, results
                best_metric, best_epoch, results = values

            snap = InMemorySnapshot(model, optimizer, scheduler=lr_scheduler)
            snap.track("average", tensors=task.get_trainable_module(ema=True))
            snap.track("best", get=lambda: (best_metric, best_epoch, results), set=best)
            with snap:
            """,
            until="results.append(latest_results)",
        ),
        Edit(
            "train.py",
            "for epoch in range(start_epoch, num_epochs):",
            "for epoch in range(snap.epoch, num_epochs):",
        ),
        Edit(
            "train.py",
            "train_metrics = train_one_epoch(\n    epoch,\n    model,\n    loader_train,",
            "train_metrics = train_one_epoch(\n    epoch,\n    model,\n    snap.data(loader_train),",
        ),
        Edit(
            "train.py",
            "num_updates = epoch * updates_per_epoch",
            "num_updates = epoch * updates_per_epoch + loader.position",
        ),
        Edit(
            "train.py",
            "update_sample_count = 0\nfor batch_idx, (input, target) in enumerate(loader):",
            "update_sample_count = 0\nfor batch_idx, (input, target) in loader.enumerate():",
        ),
    ),
)

PUBLIC: tuple[Run, ...] = (COPY, PARITY, GPT2, SCHEDULE_FREE, PPO, DQN, TIMM)
