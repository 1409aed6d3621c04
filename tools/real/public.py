"""Public training scripts that need neither a hub nor a GPU: how each is made small, and our lines in it."""

from __future__ import annotations

from tools.real import data
from tools.real.edits import Edit
from tools.real.run import Run

IMPORT = "from holdfast import InMemorySnapshot\n"

ENVIRONMENT = "public-3.11"

WORD_LM = Run(
    name="word-lm",
    framework="PyTorch examples",
    what="word_language_model, a transformer",
    script="main.py",
    arguments="--model Transformer --use-optimizer --emsize 32 --nhid 32 --nhead 2 --nlayers 2 --bptt 16 --epochs 3 "
    "--batch_size 10 --lr 0.01 --log-interval 10",
    page="docs/loops.md",
    package="torch",
    checkout="pytorch-examples/word_language_model",
    files=("main.py", "model.py", "data.py"),
    make=data.wikitext_2,
    said=r"end of epoch|End of training",
    fits=(
        Edit(
            "main.py", "epoch_start_time = time.time()", "epoch_start_time = float('inf')  # no times in what is said"
        ),
    ),
    lines=(
        Edit("main.py", "import argparse", f"{IMPORT}import argparse"),
        Edit(
            "main.py",
            "for epoch in range(1, args.epochs+1):",
            """
            snap = InMemorySnapshot(model, optimizer)
            best = ("lr", "best_val_loss")
            snap.track("best", get=lambda: {name: globals()[name] for name in best}, set=globals().update)
            with snap:
            """,
            until="lr /= 4.0",
        ),
        Edit("main.py", "for epoch in range(1, args.epochs+1):", "for epoch in range(snap.epoch + 1, args.epochs+1):"),
        Edit(
            "main.py",
            "for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):",
            "for batch, i in snap.data(range(0, train_data.size(0) - 1, args.bptt)).enumerate():",
        ),
    ),
)

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
        Edit("train_copy.py", "import torch.optim as optim", "import torch.optim as optim\ntorch.manual_seed(0)"),
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

ACTOR_CRITIC = Run(
    name="actor-critic",
    framework="PyTorch examples",
    what="reinforcement_learning/actor_critic.py, CartPole",
    script="actor_critic.py",
    page="docs/loops.md",
    checkout="pytorch-examples/reinforcement_learning",
    files=("actor_critic.py",),
    python=ENVIRONMENT,
    said="^Episode",
    fits=(Edit("actor_critic.py", "for i_episode in count(1):", "for i_episode in range(40):"),),
    lines=(
        Edit("actor_critic.py", "import argparse", f"{IMPORT}import argparse"),
        Edit(
            "actor_critic.py",
            "for i_episode in range(40):",
            """
            def place(values):
                nonlocal running_reward
                running_reward, env.unwrapped.np_random.bit_generator.state = values

            snap = InMemorySnapshot(model, optimizer)
            snap.track("place", get=lambda: (running_reward, env.unwrapped.np_random.bit_generator.state), set=place)
            with snap:
            """,
            until="""
                print(f"Solved! Running reward is now {running_reward} and "
                      f"the last episode runs to {t} time steps!")
                break
            """,
        ),
        Edit("actor_critic.py", "for i_episode in range(40):", "for i_episode in snap.steps(40):"),
    ),
)

WAVES = Run(
    name="time-sequence",
    framework="PyTorch examples",
    what="time_sequence_prediction/train.py, LBFGS",
    script="train.py",
    arguments="--steps 14",
    page="docs/loops.md",
    package="torch",
    checkout="pytorch-examples/time_sequence_prediction",
    files=("train.py",),
    make=data.waves,
    said="^test loss",
    variables=(("MPLBACKEND", "Agg"),),
    fits=(
        Edit("train.py", "data = torch.load('traindata.pt')", "data = np.load('traindata.npy')"),
        Edit("train.py", "future = 1000", "future = 10"),
        Edit(
            "train.py",
            "optimizer = optim.LBFGS(seq.parameters(), lr=0.8)",
            "optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=3)",
        ),
    ),
    lines=(
        Edit("train.py", "import argparse", f"{IMPORT}import argparse"),
        Edit(
            "train.py",
            "for i in range(opt.steps):",
            "with InMemorySnapshot(seq, optimizer) as snap:",
            until="plt.close()",
        ),
        Edit("train.py", "for i in range(opt.steps):", "for i in snap.steps(opt.steps):"),
    ),
)

PUBLIC: tuple[Run, ...] = (WORD_LM, COPY, GPT2, ACTOR_CRITIC, WAVES)
