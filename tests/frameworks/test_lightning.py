"""`InMemoryCallback` on Lightning's own trainer: killed, restarted, and compared with an undisturbed fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from holdfast import ConfigError
from tests.scripts import run

pytest.importorskip("lightning")

SCRIPT = """
import hashlib, logging, os, random, signal, sys, warnings
os.environ["HOLDFAST_EVERY"] = "1"
warnings.filterwarnings("ignore")
import numpy, torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from holdfast import StateMismatch
from holdfast.integrations.lightning import InMemoryCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
stop, kind, ends, protected = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "protected"
pl.seed_everything(0)

class Data(Dataset):
    asked = 0
    def __len__(self): return 30
    def __getitem__(self, i):
        if kind == "own state":
            self.asked += 1
            return torch.sin(torch.arange(8.0) + i + self.asked)
        noise = torch.randn(8) * random.random() + numpy.random.random()
        return torch.sin(torch.arange(8.0) + i) + 0.1 * noise

class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(7) if kind == "stream" else None  # "ahead": that of the steps
        for _ in range(30):
            yield torch.randn(8, generator=generator)

class Place(DataLoader):
    "Knows where it is, as torchdata's StatefulDataLoader does."
    order, at = [], 0
    def __iter__(self):
        if self.at == 0:
            self.order = torch.randperm(30).tolist()
        while self.at < 10:
            rows = self.order[self.at * 3 : self.at * 3 + 3]
            self.at += 1
            yield torch.stack([self.dataset[i] for i in rows])
        self.at = 0
    def state_dict(self): return {"order": list(self.order), "at": self.at}
    def load_state_dict(self, state): self.order, self.at = state["order"], state["at"]

class Net(pl.LightningModule):
    automatic_optimization = kind != "manual"
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8)
        )
        self.batch = 0
    def forward(self, x): return self.layers(x)
    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self(batch), batch)
        snap = self.trainer.callbacks[0].snapshot if protected else None
        if snap is not None and stop - 3 <= self.batch <= stop:
            snap.drain(60)  # such short steps are skipped while snapshots are being sealed
        if self.batch == stop and ends == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.batch == stop and ends == "raise":
            raise ZeroDivisionError
        print(self.batch, self.current_epoch, batch_idx, self.global_step, loss.item().hex(),
              self.trainer.optimizers[0].param_groups[0]["lr"].hex(), flush=True)
        self.batch += 1
        self.log("train", loss)
        if kind == "manual":
            for optimizer in self.optimizers():
                loss = torch.nn.functional.mse_loss(self(batch), batch)
                self.zero_grad(); self.manual_backward(loss); optimizer.step()
        return loss
    def on_train_batch_end(self, *_):
        if self.batch - 1 == stop and ends == "late":
            raise ZeroDivisionError
        if self.batch - 1 == stop and ends == "asked":
            self.trainer.should_stop = True
    def validation_step(self, batch, batch_idx):
        torch.rand(1)
        self.log("val", torch.nn.functional.mse_loss(self(batch), batch))
        if self.batch == stop and ends == "validation":
            os.kill(os.getpid(), signal.SIGKILL)
    def configure_optimizers(self):
        if kind == "manual":
            layers = [self.layers[0], self.layers[3]]
            return [torch.optim.Adam(layer.parameters(), lr=1e-2) for layer in layers]
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if kind == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
    def train_dataloader(self):
        if kind in ("stream", "ahead"): return DataLoader(Stream(), batch_size=3)
        if kind == "place": return Place(Data(), batch_size=3)
        workers = {"num_workers": 1, "persistent_workers": True} if kind == "workers that live on" else {}
        return DataLoader(Data(), batch_size=3, shuffle=True, **workers)
    def val_dataloader(self): return DataLoader(Data(), batch_size=15)

def counter(snap, module):
    snap.track("batch", get=lambda: module.batch, set=lambda value: setattr(module, "batch", value))

net = Net()
stopping = EarlyStopping("val", patience=1, min_delta=1e9) if ends == "gain" else EarlyStopping("val", patience=50)
callbacks = [InMemoryCallback(track=counter), stopping] if protected else [stopping]
average = WeightAveraging(avg_fn=get_ema_avg_fn(0.8))
if kind == "average":
    callbacks.append(average)
if kind == "accumulate more":
    callbacks.append(GradientAccumulationScheduler({0: 1, 1: 2, 2: 5}))
more = {
    "accumulate": {"accumulate_grad_batches": 4}, "plateau": {"val_check_interval": 5},
    "average": {"val_check_interval": 5},
}.get(kind, {})
trainer = pl.Trainer(
    max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=callbacks, gradient_clip_val=1.0 if kind != "manual" else None, **more,
)
try:
    trainer.fit(net)
except ZeroDivisionError:
    sys.exit(3)
except StateMismatch as error:
    sys.exit(f"end {error}")
sha = hashlib.sha256()
held = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
if kind == "average":
    held += average._average_model.state_dict().values()
for tensor in [*net.state_dict().values(), *held]:
    sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
print("end", sha.hexdigest(), torch.rand(1).item().hex(), random.random(), numpy.random.random(), trainer.global_step,
      trainer.current_epoch, stopping.state_dict(), trainer.callback_metrics["val"].item().hex(),
      trainer.fit_loop.state_dict() if protected else "")
"""


fit = partial(run, SCRIPT)


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        pytest.param("plain", [4, 10, 17], marks=pytest.mark.slow),
        pytest.param("plateau", [5, 17], marks=pytest.mark.slow),
        pytest.param("accumulate", [14, 20], marks=pytest.mark.slow),
        pytest.param("accumulate more", [14, 25], marks=pytest.mark.slow),
        pytest.param("average", [5, 17], marks=pytest.mark.slow),  # swaps weights after batches 5 and 10
        pytest.param("stream", [13], marks=pytest.mark.slow),
        pytest.param("ahead", [11, 13, 18], marks=pytest.mark.slow),
        pytest.param("place", [13], marks=pytest.mark.slow),
        pytest.param("manual", [13], marks=pytest.mark.slow),
        pytest.param("workers that live on", [4, 13], marks=pytest.mark.slow),
    ],
)
@pytest.mark.proves("lightning")
def test_a_killed_fit_goes_on_bit_for_bit(arena: Path, kind: str, stops: list[int]) -> None:
    undisturbed = fit(-1, kind)
    lines: list[str] = []
    for stop in stops:
        before = fit(stop, kind)
        assert before[-1].startswith(f"{stop - 1} ")
        lines = lines[: int(before[0].split()[0])] + before
        each = {"accumulate": 4, "accumulate more": (1, 2, 5)[stop // 10]}.get(kind, 1)
        lost = stop % 10 % each
        lines = lines[: stop - lost]
    after = fit(-1, kind)
    assert lines + after == undisturbed
    assert not (arena / "test").exists()


@pytest.mark.slow
def test_a_restart_that_is_given_another_batch_is_refused(arena: Path) -> None:
    """The data set counts what it gives, which nobody restores."""
    fit(13, "own state")
    with pytest.raises(AssertionError, match="another batch"):
        fit(-1, "own state")
    assert (arena / "test").exists()


def test_averaging_that_cannot_be_put_back_is_refused_by_name(arena: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from holdfast.integrations.lightning import InMemoryCallback

    callbacks = [StochasticWeightAveraging(1e-2), InMemoryCallback()]
    trainer = Trainer(accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"StochasticWeightAveraging.*EMAWeightAveraging"):
        callbacks[1].on_fit_start(trainer, LightningModule())


@pytest.mark.slow
def test_the_callback_changes_nothing(arena: Path) -> None:
    alone = fit(-1, "plain", protected=False)
    protected = fit(-1, "plain")
    assert alone[:-1] == protected[:-1]
    assert protected[-1].startswith(alone[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "first"), [("raise", 13), ("late", 13), ("validation", 9)])
def test_an_exception_or_a_kill_in_validation_loses_one_step_at_most(arena: Path, ends: str, first: int) -> None:
    undisturbed = fit(-1, "plain")
    fit(10 if ends == "validation" else 13, "plain", ends)
    assert (arena / "test").exists()
    after = fit(-1, "plain")
    assert after == undisturbed[first:]


@pytest.mark.slow
def test_a_fit_that_is_stopped_goes_on_in_its_epoch(arena: Path) -> None:
    undisturbed = fit(-1, "plain")
    before = fit(13, "plain", "asked")
    assert before[:-1] == undisturbed[:14]
    assert (arena / "test").exists()
    after = fit(-1, "plain")
    assert after == undisturbed[13:]
    assert not (arena / "test").exists()


@pytest.mark.slow
def test_a_fit_that_gains_nothing_any_more_is_over(arena: Path) -> None:
    lines = fit(-1, "plain", "gain")
    assert len(lines) == 20 + 1
    assert not (arena / "test").exists()
