"""`protect` on loops of accelerate: killed, restarted, and compared with an undisturbed run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast import ConfigError
from tests.scripts import run

accelerate = pytest.importorskip("accelerate")

SCRIPT = """
import hashlib, os, random, signal, sys
os.environ["HOLDFAST_EVERY"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
import torch
from accelerate import Accelerator
from accelerate.test_utils.training import RegressionDataset
from accelerate.utils import DataLoaderConfiguration, set_seed
from contextlib import nullcontext
from holdfast.integrations.accelerate import protect

torch.set_num_threads(1)
stop, kind, ends, protected = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "protected"
accelerator = Accelerator(
    mixed_precision="bf16" if kind == "bf16" else "no",
    gradient_accumulation_steps=3,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=kind in ("seedable", "bf16")),
)
set_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
workers = 1 if kind == "workers" else 0
loader = torch.utils.data.DataLoader(RegressionDataset(length=40, seed=1), 4, shuffle=True, num_workers=workers)
held = torch.utils.data.DataLoader(RegressionDataset(length=8, seed=2), 4)

class Count:
    def __init__(self): self.evaluations = 0
    def state_dict(self): return {"evaluations": self.evaluations}
    def load_state_dict(self, state): self.evaluations = state["evaluations"]

count = Count()
model, optimizer, loader, held, scheduler = accelerator.prepare(model, optimizer, loader, held, scheduler)
accelerator.register_for_checkpointing(count)
number = 0

def loss_of(batch):
    return (model(batch["x"][:, None].float()).squeeze(1) - batch["y"].float()).square().mean()

def train(epochs, data):
    global number
    for epoch in epochs:
        for batch in data:
            with accelerator.accumulate(model):
                loss = loss_of(batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            print(number, epoch, accelerator.sync_gradients, batch["x"].sum().item().hex(), loss.item().hex(),
                  scheduler.get_last_lr()[0].hex(), flush=True)
            number += 1
            if number == stop:
                snap.drain(60)
                os.kill(os.getpid(), signal.SIGKILL)
        model.eval()
        with torch.no_grad():
            print(number, "held", sum(loss_of(batch).item() for batch in held).hex(), random.random().hex())
        count.evaluations += 1
        model.train()

if protected:
    with protect(accelerator) as snap:
        number = 10 * snap.epoch + snap.data(loader).position
        train(range(snap.epoch, 3), snap.data(loader))
else:
    train(range(3), loader)
state = [value for p in model.parameters() for value in optimizer.state[p].values()]
sha = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in [*model.state_dict().values(), *state]))
print("end", sha.hexdigest(), torch.rand(1).item().hex(), random.random(), count.evaluations, scheduler.state_dict())
"""

train = partial(run, SCRIPT)


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("bf16", [16]),
        *(pytest.param(kind, [5, 10, 24], marks=pytest.mark.slow) for kind in ("plain", "seedable", "workers")),
    ],
)
def test_a_killed_loop_goes_on_bit_for_bit(arena: Path, kind: str, stops: list[int]) -> None:
    undisturbed = train(-1, kind, protected=False)
    for stop in stops:
        before = train(stop, kind)
        assert before[-1] in undisturbed
    after = train(-1, kind)
    assert 0 < len(after) < len(undisturbed)  # on a busy machine the newest snapshots may be skipped
    assert after == undisturbed[-len(after) :]
    assert not (arena / "test").exists()


def test_what_cannot_be_protected_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.integrations.accelerate import protect

    accelerator: Any = accelerate.Accelerator(cpu=True)
    accelerator.free_memory()
    with pytest.raises(ConfigError, match="prepared no model"):
        protect(accelerator)
    monkeypatch.setattr(type(accelerator), "distributed_type", "FSDP")
    with pytest.raises(ConfigError, match="FSDP is not supported"):
        protect(accelerator)
