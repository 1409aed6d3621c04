"""Scripts of pytorch/examples that need neither a hub nor a GPU: how each is made small, and our lines in it."""

from __future__ import annotations

from tools.real import data
from tools.real.edits import Edit
from tools.real.run import Run

IMPORT = "from holdfast import InMemorySnapshot\n"

ENVIRONMENT = "public-3.11"
"""What the scripts import besides torch."""

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
    checkout="pytorch-examples/time_sequence_prediction",
    files=("train.py",),
    make=data.waves,
    python=ENVIRONMENT,
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

BATCHES = "batches = snap.data(range(0, train_data.size(0) - 1, args.bptt))"

LSTM = WORD_LM._replace(
    name="word-lm-lstm",
    what="word_language_model, an LSTM whose hidden state goes from batch to batch",
    arguments="--model LSTM --use-optimizer --emsize 32 --nhid 32 --nlayers 2 --bptt 16 --epochs 3 --batch_size 10 "
    "--lr 0.01 --log-interval 10",
    lines=(
        *WORD_LM.lines[:-1],
        Edit(
            "main.py",
            "with snap:",
            """
            hidden = None
            snap.track("hidden", get=lambda: hidden, set=lambda value: globals().update(hidden=value))
            with snap:
            """,
        ),
        Edit("main.py", "def train():", "def train():\n    global hidden"),
        Edit(
            "main.py",
            "if args.model != 'Transformer':\n    hidden = model.init_hidden(args.batch_size)",
            f"{BATCHES}\nif not batches.position:\n    hidden = model.init_hidden(args.batch_size)",
        ),
        Edit(
            "main.py",
            "for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):",
            "for batch, i in batches.enumerate():",
        ),
    ),
)

BY_HAND = WORD_LM._replace(
    name="word-lm-by-hand",
    what="word_language_model, whose loop changes the weights without an optimizer",
    arguments=WORD_LM.arguments.replace("--use-optimizer ", "").replace("--lr 0.01", "--lr 5"),
    first=("tools.real.steps_by_hand",),
    lines=tuple(
        edit._replace(new=edit.new.replace("InMemorySnapshot(model, optimizer)", "InMemorySnapshot(model)"))
        for edit in WORD_LM.lines
    ),
)

REGRESSION = Run(
    name="regression",
    framework="PyTorch examples",
    what="regression/main.py, without an optimizer",
    script="main.py",
    page="docs/loops.md",
    package="torch",
    checkout="pytorch-examples/regression",
    files=("main.py",),
    first=("tools.real.steps_by_hand",),
    said="Loss|function",
    fits=(Edit("main.py", "for batch_idx in count(1):", "for batch_idx in range(1, 61):"),),
    lines=(
        Edit("main.py", "from itertools import count", f"{IMPORT}from itertools import count"),
        Edit("main.py", "for batch_idx in range(1, 61):", "with InMemorySnapshot(fc) as snap:", until="break"),
        Edit(
            "main.py", "for batch_idx in range(1, 61):", "for batch_idx in range(snap.step + 1, 61):\n    snap.begin()"
        ),
    ),
)

REINFORCE = ACTOR_CRITIC._replace(
    name="reinforce",
    what="reinforcement_learning/reinforce.py, CartPole",
    script="reinforce.py",
    files=("reinforce.py",),
    fits=(Edit("reinforce.py", "for i_episode in count(1):", "for i_episode in range(40):"),),
    lines=tuple(
        edit._replace(
            file="reinforce.py",
            new=edit.new.replace("InMemorySnapshot(model,", "InMemorySnapshot(policy,"),
            until=edit.until
            and """
            print(f"Solved! Running reward is now {running_reward} and the last episode runs to {t} time steps!")
            break
            """,
        )
        for edit in ACTOR_CRITIC.lines
    ),
)

MNIST = Run(
    name="mnist",
    framework="PyTorch examples",
    what="mnist/main.py",
    script="main.py",
    arguments="--no-accel --epochs 3 --batch-size 16 --test-batch-size 32 --log-interval 5",
    page="docs/loops.md",
    checkout="pytorch-examples/mnist",
    files=("main.py",),
    make=data.digits,
    python=ENVIRONMENT,
    first=("tools.real.torchvision_on_cpu",),
    said="Test set|Train Epoch",
    lines=(
        Edit("main.py", "import argparse", f"import argparse\n{IMPORT}"),
        Edit(
            "main.py",
            "for epoch in range(1, args.epochs + 1):",
            "with InMemorySnapshot(model, optimizer, scheduler=scheduler) as snap:",
            until="scheduler.step()",
        ),
        Edit(
            "main.py", "for epoch in range(1, args.epochs + 1):", "for epoch in range(snap.epoch + 1, args.epochs + 1):"
        ),
        Edit(
            "main.py",
            "train(args, model, device, train_loader, optimizer, epoch)",
            "train(args, model, device, snap.data(train_loader), optimizer, epoch)",
        ),
        Edit(
            "main.py",
            "for batch_idx, (data, target) in enumerate(train_loader):",
            "for batch_idx, (data, target) in train_loader.enumerate():",
        ),
    ),
)

MNIST_RNN = MNIST._replace(
    name="mnist-rnn",
    what="mnist_rnn/main.py, shuffles what it evaluates",
    arguments=MNIST.arguments.replace("--no-accel ", ""),
    checkout="pytorch-examples/mnist_rnn",
)

SIAMESE = MNIST._replace(
    name="siamese",
    what="siamese_network/main.py, draws pairs by Python's generator",
    checkout="pytorch-examples/siamese_network",
    lines=(
        Edit("main.py", "import argparse, random, copy", f"import argparse, random, copy\n{IMPORT}"),
        *MNIST.lines[1:-1],
        Edit(
            "main.py",
            "for batch_idx, (images_1, images_2, targets) in enumerate(train_loader):",
            "for batch_idx, (images_1, images_2, targets) in train_loader.enumerate():",
        ),
    ),
)

DCGAN = Run(
    name="dcgan",
    framework="PyTorch examples",
    what="dcgan/main.py, two optimizers, two processes read data",
    script="main.py",
    arguments="--dataset fake --batchSize 8 --nz 8 --ngf 4 --ndf 4 --niter 3 --manualSeed 1",
    page="docs/loops.md",
    checkout="pytorch-examples/dcgan",
    files=("main.py",),
    python=ENVIRONMENT,
    first=("tools.real.torchvision_on_cpu",),
    said="Loss_D",
    fits=(
        Edit(
            "main.py",
            "dataset = dset.FakeData(image_size=(3, opt.imageSize, opt.imageSize),",
            "dataset = dset.FakeData(size=80, image_size=(3, opt.imageSize, opt.imageSize),",
        ),
    ),
    lines=(
        Edit("main.py", "import argparse", f"import argparse\n{IMPORT}"),
        Edit(
            "main.py",
            "for epoch in range(opt.niter):",
            "with InMemorySnapshot([netD, netG], [optimizerD, optimizerG]) as snap:",
            until="torch.save(netD.state_dict(), '%s/netD_epoch_%d.pth' % (opt.outf, epoch))",
        ),
        Edit("main.py", "for epoch in range(opt.niter):", "for epoch in range(snap.epoch, opt.niter):"),
        Edit(
            "main.py",
            "for i, data in enumerate(dataloader, 0):",
            "for i, data in snap.data(dataloader).enumerate():",
        ),
    ),
)

SERIES = Run(
    name="ddp-series",
    framework="PyTorch examples",
    what="distributed/ddp-tutorial-series/multigpu_torchrun.py, DDP",
    script="multigpu_torchrun.py",
    arguments="3 1 --batch_size 8",
    page="docs/loops.md",
    package="torch",
    checkout="pytorch-examples/distributed/ddp-tutorial-series",
    files=("multigpu_torchrun.py", "datautils.py"),
    ranks=2,
    said="saved",
    fits=(
        Edit(  # the entropy of a single class is zero, and nothing would be trained
            "multigpu_torchrun.py",
            "loss = F.cross_entropy(output, targets)",
            "loss = F.mse_loss(output, targets)",
        ),
        Edit("multigpu_torchrun.py", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', ""),
        Edit("multigpu_torchrun.py", 'init_process_group(backend="nccl")', 'init_process_group(backend="gloo")'),
        Edit("multigpu_torchrun.py", "self.model = model.to(self.gpu_id)", "self.model = model"),
        Edit(
            "multigpu_torchrun.py",
            "self.model = DDP(self.model, device_ids=[self.gpu_id])",
            "self.model = DDP(self.model)",
        ),
        Edit("multigpu_torchrun.py", 'loc = f"cuda:{self.gpu_id}"', 'loc = "cpu"'),
        Edit("multigpu_torchrun.py", "source = source.to(self.gpu_id)", ""),
        Edit("multigpu_torchrun.py", "targets = targets.to(self.gpu_id)", ""),
        Edit("multigpu_torchrun.py", "pin_memory=True,", ""),
        Edit(
            "multigpu_torchrun.py",
            "train_set = MyTrainDataset(2048)  # load your dataset",
            "train_set = MyTrainDataset(256)",
        ),
    ),
    lines=(
        Edit("multigpu_torchrun.py", "import os", f"{IMPORT}import os"),
        Edit(
            "multigpu_torchrun.py",
            "for epoch in range(self.epochs_run, max_epochs):",
            "with InMemorySnapshot(self.model, self.optimizer) as self.snap:",
            until="self._save_snapshot(epoch)",
        ),
        Edit(
            "multigpu_torchrun.py",
            "for epoch in range(self.epochs_run, max_epochs):",
            "for epoch in range(self.snap.epoch, max_epochs):",
        ),
        Edit(
            "multigpu_torchrun.py",
            "for source, targets in self.train_data:",
            "for source, targets in self.snap.data(self.train_data):",
        ),
    ),
)

GPT_DDP = Run(
    name="mingpt-ddp",
    framework="PyTorch examples",
    what="distributed/minGPT-ddp, DDP",
    script="main.py",
    arguments="gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=32 data_config.path=input.txt "
    "data_config.block_size=16 data_config.truncate=0.03 trainer_config.max_epochs=3 trainer_config.batch_size=8 "
    "trainer_config.data_loader_workers=2 trainer_config.use_amp=false trainer_config.save_every=1 "
    "trainer_config.snapshot_path=none.pt",
    page="docs/loops.md",
    checkout="pytorch-examples/distributed/minGPT-ddp/mingpt",
    files=("main.py", "trainer.py", "model.py", "char_dataset.py", "gpt2_train_cfg.yaml"),
    make=data.characters,
    python=ENVIRONMENT,
    ranks=2,
    said="Loss",
    fits=(
        Edit("main.py", "acc = torch.accelerator.current_accelerator()", ""),
        Edit("main.py", 'device: torch.device = torch.device(f"{acc}:{rank}")', 'device = torch.device("cpu")'),
        Edit("main.py", "torch.accelerator.set_device_index(rank)", ""),
        Edit("main.py", "if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:  # on CPUs"),
        Edit("trainer.py", "import boto3", ""),
        Edit("trainer.py", "self.acc = torch.accelerator.current_accelerator()", ""),
        Edit(
            "trainer.py",
            'self.device: torch.device = torch.device(f"{self.acc}:{self.local_rank}")',
            'self.device = torch.device("cpu")',
        ),
        Edit("trainer.py", "self.model = model.to(self.local_rank)", "self.model = model"),
        Edit(
            "trainer.py", "self.model = DDP(self.model, device_ids=[self.local_rank])", "self.model = DDP(self.model)"
        ),
        Edit("trainer.py", "pin_memory=True,", ""),
        Edit("trainer.py", "source = source.to(self.local_rank)", ""),
        Edit("trainer.py", "targets = targets.to(self.local_rank)", ""),
    ),
    lines=(
        Edit("trainer.py", "import os", f"{IMPORT}import os"),
        Edit(
            "trainer.py",
            "for epoch in range(self.epochs_run, self.config.max_epochs):",
            "with InMemorySnapshot(self.model, self.optimizer) as self.snap:",
            until="self._run_epoch(epoch, self.test_loader, train=False)",
        ),
        Edit(
            "trainer.py",
            "for epoch in range(self.epochs_run, self.config.max_epochs):",
            "for epoch in range(self.snap.epoch, self.config.max_epochs):",
        ),
        Edit(
            "trainer.py",
            "for iter, (source, targets) in enumerate(dataloader):",
            """
            batches = self.snap.data(dataloader).enumerate() if train else enumerate(dataloader)
            for iter, (source, targets) in batches:
            """,
        ),
    ),
)

EXAMPLES: tuple[Run, ...] = (
    WORD_LM,
    LSTM,
    BY_HAND,
    REGRESSION,
    ACTOR_CRITIC,
    REINFORCE,
    WAVES,
    MNIST,
    MNIST_RNN,
    SIAMESE,
    DCGAN,
    SERIES,
    GPT_DDP,
)
