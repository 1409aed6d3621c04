"""The recipes of the README and the pages: each block of code that trains is run as it stands there, killed twice,
restarted, and compared with an undisturbed run, step by step.

Such a block carries a marker in the line above it, ``<!--recipe:NAME-->``: what it takes as given is in `RECIPES`. A
marker may name the file whose tests run the same code where it needs a cluster.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!--recipe:(\S+)-->\n)?```python\n(.*?)^```", re.M | re.S)
TRAINS = re.compile(
    r"\b(?:InMemorySnapshot|protect)\(|\bsnap\.(?:data|steps|begin)\(|Memory\w+\(|Callback\(|GlobalBatches\("
)

GIVEN = """
import copy, hashlib, os, pathlib, signal, sys, time, warnings
os.environ |= {"HOLDFAST_EVERY": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset
from holdfast import InMemorySnapshot

torch.manual_seed(0)
torch.set_num_threads(1)
folder, dies, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 0

def stepped(optimizer, *_):
    global steps
    steps += 1
    digest = hashlib.sha256()
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        part = getattr(parameter, "to_local", lambda: parameter)()
        digest.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print("step", digest.hexdigest(), flush=True)
    for snap in entered:  # so that each step finds a slot
        snap.drain(60)
    if steps == dies:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(stepped)
entered, enter = [], InMemorySnapshot.__enter__

def enter_noted(snap):
    entered[:] = [snap]
    return enter(snap)

InMemorySnapshot.__enter__ = enter_noted

def make():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

model, optim = make()
scheduler = schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
loss_of = nn.functional.cross_entropy
n_epochs = epochs = 3
n_steps = 12
table = TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
loader = DataLoader(table, batch_size=8, shuffle=True)
"""

Recipe = Callable[[str], str]
"""What a block is made part of."""

PLAIN = """
def train_step(step):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    optim.zero_grad()
    loss_of(model(x), torch.arange(8) % 4).backward()
    optim.step()
"""

TRAIN = """
def train(x, y):
    optim.zero_grad()
    loss_of(model(x), y).backward()
    optim.step()

def get_batch(split):
    return torch.randn(8, 8), torch.randint(0, 4, (8,))
"""


def after(given: str, **instead: str) -> Recipe:
    """A block that stands alone, after this. ``_`` says what stands for the dots that are a whole line of it."""

    def script(block: str) -> str:
        dots = iter(instead.get("_", "").split(" | "))
        return given + re.sub(r"^( *)\.\.\.(?: *#.*)?$", lambda found: indent(next(dots), found[1]), block, flags=re.M)

    return script


def inside(given: str, body: str, more: str = "") -> Recipe:
    """A block that stands in the block of a snapshot. `body` is a line for its dots."""

    def script(block: str) -> str:
        text = re.sub(r"^( *)\.\.\.(?: *#.*)?$", lambda found: indent(body, found[1]), block, flags=re.M)
        return f"{given}\nwith InMemorySnapshot(model, optim{more}) as snap:\n{indent(text, '    ')}"

    return script


def portions(block: str) -> str:
    first, rest = block.split("\n", 1)
    rest = rest.replace("model(dataset[numbers])", "model(dataset[numbers]).square()") + "optim.zero_grad()\n"
    return f"""
from holdfast.integrations.batches import GlobalBatches, portion
dataset, ranks, rank = torch.randn(4096, 8), 1, 0
{first}
with InMemorySnapshot(model, optim, extra={{"data": batches}}) as snap:
    for step in snap.steps(8):
{indent(rest, "        ")}"""


FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
alone()
mesh = init_device_mesh("cpu", (1,))

def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model.blocks = list(model)
    return model

class Schedule:
    def step(self): pass
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

scheduler = Schedule()

def train_step(model, optim, batch):
    optim.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optim.step()
"""

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 31, (48, 9))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    str(folder), num_train_epochs=2, per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True,
)
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator, optimizer = Accelerator(cpu=True, gradient_accumulation_steps=2), optim

def loss_of(found):
    return found.square().mean()

loader = DataLoader(torch.randn(64, 8), batch_size=8, shuffle=True)
"""

LIGHTNING = """
import logging
from lightning.pytorch import LightningModule, Trainer as Fit
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = model
    def training_step(self, batch, index): return loss_of(self.inner(batch[0]), batch[1])
    def validation_step(self, batch, index): self.log("loss", loss_of(self.inner(batch[0]), batch[1]))
    def val_dataloader(self): return DataLoader(table, batch_size=16)
    def configure_optimizers(self): return torch.optim.AdamW(self.inner.parameters(), lr=1e-2)

def Trainer(**given):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Fit(max_epochs=3, accelerator="cpu", **quiet, **given)

model, data = Model(), loader
"""

STATE = f"""{TRAIN}
class Stage:
    value = 0
    def restore(self, value): self.value = value

class Sampler:
    at = 0
    def state_dict(self): return {{"at": self.at}}
    def load_state_dict(self, state): self.at = state["at"]

def turns():
    for step in snap.steps(n_steps):
        x, y = get_batch("train")
        train((1 + stage.value) * x + sampler.at, y)
        scheduler.step()
        with torch.no_grad():
            for mine, theirs in zip(ema_model.parameters(), model.parameters()):
                mine.lerp_(theirs, 0.1)
                if step % 5 == 4:
                    theirs.copy_(mine)
        stage.value, sampler.at = stage.value + 1, sampler.at + 2

stage, sampler, scaler, ema_model = Stage(), Sampler(), torch.amp.GradScaler("cpu", enabled=False), copy.deepcopy(model)
"""

BLOCKS = f"""{TRAIN}
rates, optimizer = [1e-2, 1e-3], optim

def saved(rate):
    return folder / str(rate)

def training(rate):
    for group in optim.param_groups:
        group["lr"] = rate
    for step in snap.steps(6):
        train(*get_batch("train"))
    torch.save(model.state_dict(), saved(rate))
"""

DATA = "from holdfast.integrations.batches import GlobalBatches\nbatches = GlobalBatches(samples=32, batch=8, seed=1)\n"

RECIPES: dict[str, Recipe] = {
    "loader": after(""),
    "plain": after(PLAIN),
    "protected": after(TRAIN, _="for step in snap.steps(n_steps): train(*get_batch('train'))"),
    "ahead": inside(TRAIN, "train(X, Y)\nif snap.step == n_steps - 1: snap.finish(); break"),
    "variables": after(f"{TRAIN}max_iters = 12\n", _="x, y = X, Y | train(x, y)"),
    "state": after(STATE, _="turns()"),
    "blocks": after(BLOCKS, _="training(rate)"),
    "elastic": after(DATA + TRAIN, _="train(*(part[next(batches)] for part in table.tensors)); schedule.step()"),
    "portions": portions,
    "fsdp2": after(FSDP),
    "trainer": after(TRAINER),
    "accelerate": after(ACCELERATE),
    "lightning": after(LIGHTNING),
}

NEEDS = {"trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning"}


def recipes() -> list[tuple[str, str]]:
    """Where a block that trains is, with its marker, and the block."""
    found = []
    for page in PAGES:
        if page.name.startswith("reference-"):
            continue  # generated from docstrings, as fragments
        for marker, block in BLOCK.findall(page.read_text()):
            if TRAINS.search(block):
                found.append((f"{page.name}:{marker}", block))
    return found


def test_every_block_that_trains_is_run_here_or_by_a_named_test() -> None:
    markers = [place.partition(":")[2] for place, _ in recipes()]
    assert all(marker in RECIPES or (ROOT / marker).is_file() for marker in markers), recipes()
    assert "" not in markers
    assert RECIPES.keys() <= set(markers)


def run(script: str, job: str, folder: Path, dies: int) -> list[str]:
    """The digests after each step of one life: a process that is forked from this one, which has imported torch."""
    folder.mkdir(exist_ok=True)
    printed = folder / "printed"
    child = os.fork()
    if not child:
        status = 1
        try:
            with printed.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ["HOLDFAST_JOB"] = job
            sys.argv = ["recipe", str(folder), str(dies)]
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            try:
                exec(script, {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    end = os.pidfd_open(child)
    try:
        if not select.select([end], [], [], 2 * DEADLINE_S)[0]:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(end)
    said = printed.read_text()
    assert status == (-signal.SIGKILL if dies else 0), said
    return [line for line in said.splitlines() if line.startswith("step ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "block"), [pytest.param(*each, id=each[0]) for each in recipes() if "/" not in each[0]]
)
def test_a_recipe_is_exact(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, block: str
) -> None:
    name = place.partition(":")[2]
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = GIVEN + RECIPES[name](block)
    alone = run(script, "alone", tmp_path / "alone", 0)
    assert len(set(alone)) == len(alone) >= 8
    done = 0  # steps that a life has come to
    for dies in (4, 3, 0):
        life = run(script, "killed", tmp_path / "killed", dies)
        first = alone.index(life[0])
        assert life == alone[first : first + len(life)]
        assert done - 1 <= first <= done, "more than the step in which it died was done again"
        done = first + len(life)
    assert done == len(alone)
