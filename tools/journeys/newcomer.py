"""What all three newcomers start with: a checkout, an environment that has only torch, and their own training loop."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

from tools.journeys.hosts import Failed
from tools.journeys.pages import Docs
from tools.pythons import ROOT
from tools.wheels import environment


def checkout(target: Path) -> Docs:
    """Copy the project's working tree, without files that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    return Docs(target)


def activated(python: str, name: str, torch: str) -> Path:
    """The interpreter of a new environment. `torch`: a requirement to install, or a folder of packages with torch."""
    if not Path(torch).is_dir():
        return environment(python, f"journey-{name}", torch)
    own = environment(python, f"journey-{name}")
    [site] = (own.parent.parent / "lib").glob("python*/site-packages")
    (site / "zz-torch.pth").write_text(torch + "\n")
    torchrun = own.parent / "torchrun"  # an installed torch would provide it
    torchrun.write_text(f"#!{own}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    return own


BEFORE = """
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
made = torch.Generator().manual_seed(100 + dist.get_rank())
points = torch.randn(320, 8, generator=made)
loader = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.7)
n_epochs = 5

def loss_of(output, y):
    loss = nn.functional.mse_loss(output, y)
    if dist.get_rank() == 0:
        print(f"step {snap.step} loss {loss.item().hex()}", flush=True)
    while held(snap.step):
        time.sleep(0.02)
    return loss

def held(step):
    try:
        return step == int(open("hold").read())
    except (FileNotFoundError, ValueError):
        return False
"""
AFTER = """
if dist.get_rank() == 0:
    print("weights", sum(p.double().sum().item() for p in model.parameters()).hex(), flush=True)
dist.destroy_process_group()
"""
STEPS = 200


class Hold:
    """Holds the script at a step, so that faults can be injected there however slow this machine is."""

    def __init__(self, docs: Docs) -> None:
        self._file = docs.root / "hold"

    def at(self, step: int) -> None:
        """Hold the script at `step` and no longer at the previous one."""
        self._file.write_text(str(step))

    def go(self) -> None:
        """Hold the script nowhere."""
        self._file.unlink()


def training(docs: Docs) -> str:
    """The reader's own script around the unchanged loop of the first page. Raises `Failed`."""
    loop = docs.program("docs/start.md", "Wrap the loop")
    if "InMemorySnapshot" not in loop:
        raise Failed("the loop of docs/start.md does not protect anything")
    return textwrap.dedent(BEFORE) + "\n" + loop + textwrap.dedent(AFTER)


def told(lines: list[str]) -> dict[int, str]:
    """The last loss that a run of `training` printed for each step."""
    steps = [line.partition("step ")[2].split() for line in lines if "step " in line and " loss " in line]
    return {int(words[0]): words[2] for words in steps if len(words) == 3 and words[1] == "loss"}


def weights(lines: list[str]) -> str:
    """The final weights that a run of `training` printed. Raises `Failed` if it did not reach its end."""
    found = [line.partition("weights ")[2] for line in lines if "weights " in line]
    if len(found) != 1:
        raise Failed("it has not come to its end:\n" + "\n".join(lines[-30:]))
    return found[0]


def check_same(undisturbed: list[str], killed: list[str]) -> None:
    """Raise `Failed` unless all losses and the weights are the same to the last bit."""
    expected, found = told(undisturbed), told(killed)
    if len(expected) != STEPS or found != expected or weights(undisturbed) != weights(killed):
        wrong = [step for step in expected if found.get(step) != expected[step]]
        raise Failed(f"{len(expected)} steps, of which {wrong[:5]} differ: {weights(undisturbed)}, {weights(killed)}")
