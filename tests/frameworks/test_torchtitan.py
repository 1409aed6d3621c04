"""What a snapshot of torchtitan's trainer includes, on a trainer of the same form; `tools/real` has the real one."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast import ConfigError
from holdfast.integrations.torchtitan_trainer import NEEDED, SnapshotOptions, TrainerSnapshots, check
from holdfast.snapshot.options import Options, OptionsGiven
from tests.system.test_hook import small


class Loader:
    """Its iterator draws a number when it is made, as a DataLoader's does."""

    def __init__(self) -> None:
        self.at = 0
        self.dp_world_size = 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        seed = torch.randint(1 << 30, ())
        return self._from(int(seed))

    def _from(self, seed: int) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((2, 4), float(self.at + seed % 7))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ParallelAwareDataloader(Loader):
    """Like torchtitan's: it packs the state of its base class."""

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": pickle.dumps(super().state_dict()), "world_size": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing that comes out of shared memory is unpickled")


class Trainer:
    """torchtitan's loop: it counts a step before it takes it, saves after it, and then validates."""

    def __init__(self, loader: Loader, stop: int | None = None) -> None:
        torch.manual_seed(3)
        self.model, self.optim = small()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda step: 1 / (1 + step))
        self.metrics_processor = SimpleNamespace(
            ntokens_since_last_log=0, data_loading_times=[], time_last_log=time.perf_counter()
        )
        self.validator = SimpleNamespace(
            validation_dataloader=SimpleNamespace(dataset=SimpleNamespace(_sample_idx=0, _token_buffer=[]))
        )
        self.dataloader, self.stop = loader, stop
        self.step = self.ntokens_seen = 0
        self.losses: dict[int, str] = {}
        options = SnapshotOptions(keep=True, strict=True)
        parts = {"model_parts": [self.model], "optimizers": self.optim, "lr_schedulers": self.schedule}
        self.snapshots = TrainerSnapshots({"train_state": self}, parts | {"dataloader": loader}, options)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def batch_generator(self, loader: Any) -> Iterator[torch.Tensor]:
        batches = iter(loader)
        while True:
            self.metrics_processor.ntokens_since_last_log += 8
            self.metrics_processor.data_loading_times.append(0.5)
            yield next(batches)

    def train_step(self, batches: Iterator[torch.Tensor]) -> None:
        self.optim.zero_grad()
        batch = next(batches)
        self.ntokens_seen += batch.numel()
        loss = self.model(batch + torch.rand(())).square().mean()
        loss.backward()
        if self.step == self.stop:
            raise KeyboardInterrupt
        self.optim.step()
        self.schedule.step()
        self.losses[self.step] = loss.item().hex()

    def train(self) -> bool:
        went_on = self.snapshots.enter()
        batches = self.batch_generator(self.dataloader)
        while self.step < 8:
            self.step += 1
            self.train_step(batches)
            if self.snapshots._snap is not None and self.stop is not None:
                self.snapshots._snap.drain(60)  # otherwise such short steps are skipped while snapshots are sealed
            if self.step % 3 == 0:
                self.validator.validation_dataloader.dataset._sample_idx += 5
                torch.rand(2)
        return went_on

    def end(self) -> dict[str, Any]:
        metrics = self.metrics_processor
        return {
            "weights": [p.tolist() for p in self.model.parameters()],
            "losses": self.losses,
            "counters": (self.step, self.ntokens_seen, self.dataloader.at, self.schedule.last_epoch),
            "metrics": (metrics.ntokens_since_last_log, metrics.data_loading_times),
            "validation": vars(self.validator.validation_dataloader.dataset),
            "generator": torch.get_rng_state().tolist(),
        }


@pytest.mark.parametrize("kind", [Loader, ParallelAwareDataloader])
def test_a_trainer_goes_on_bit_for_bit(kind: type[Loader], arena: Path) -> None:
    plain = Trainer(Loader())
    plain.snapshots.leave(None)  # never entered: the loop runs alone
    plain.snapshots.enter = lambda: False  # type: ignore[method-assign]
    plain.train()
    with pytest.raises(KeyboardInterrupt):
        Trainer(kind(), stop=6).train()
    resumed = Trainer(kind())
    assert resumed.train()
    assert min(resumed.losses) > 1
    assert resumed.losses == {step: plain.losses[step] for step in resumed.losses}
    wanted = plain.end() | {"losses": resumed.losses}
    assert resumed.end() == wanted


def test_a_trainer_is_left_as_it_was(arena: Path) -> None:
    trainer = Trainer(Loader())
    trainer.train()
    assert not {"train", "train_step", "batch_generator"} & vars(trainer).keys()


def test_another_number_of_ranks_is_refused(arena: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Trainer(Loader(), stop=5).train()
    loader = Loader()
    loader.dp_world_size = 2
    with pytest.raises(Exception, match=r"for 1 data-parallel ranks.* 2"):
        Trainer(loader).train()


def test_releases_that_nobody_has_tried_are_said_and_old_ones_refused(caplog: pytest.LogCaptureFixture) -> None:
    trainer = SimpleNamespace(**dict.fromkeys(NEEDED))
    with caplog.at_level(logging.WARNING):
        check("0.2.2", trainer)
        check("0.3.0", trainer)
        assert not caplog.records
        check("0.4.0", trainer)
    assert "0.4.0 was never tried" in caplog.text and "docs/support.md" in caplog.text
    with pytest.raises(ConfigError, match=r"torchtitan 0\.1\.0"):
        check("0.1.0", trainer)
    del trainer.batch_generator
    with pytest.raises(ConfigError, match="has no batch_generator"):
        check("0.3.0", trainer)


def test_the_options_of_a_configuration_are_those_of_the_hook() -> None:
    given = asdict(SnapshotOptions())
    assert given.keys() <= OptionsGiven.__annotations__.keys()
    assert (given["every"], given["keep"], given["job"], given["generations"]) == (None, False, None, None)
    assert Options.given(**given | {"job": "some"}) == Options(job="some")
