"""What a trainer's subclass keeps in attributes: captured and put back, or refused by name."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.integrations.callbacks import LARGEST, SubclassState
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.state.values import decode, encode


class Base:
    """Stands for the framework's trainer."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.base_counter = 0
        self.start_later = lambda: None

    def train(self) -> None:
        self.set_by_base = [torch.ones(2)]


Base.__module__ = "framework.trainer"


class Generating(Base):
    """Keeps what it generated, as TRL's trainers do."""

    def __init__(self) -> None:
        super().__init__()
        self.buffered: Any = None
        self.count = 0
        self.weights = torch.arange(3.0)
        self.metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.texts: deque[str] = deque(maxlen=2)

    def step(self) -> None:
        self.count += 1
        self.base_counter += 1
        self.buffered = [{"ids": torch.full((2, self.count), 7), "mask": None, "loss": torch.tensor(0.5).bfloat16()}]
        self.metrics["train"]["reward"].append(1.5)
        self.texts.append(str(self.count))


def through_json(held: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    text = encode(held, "kept", tensors)
    assert not tensors  # each would be a leaf of its own
    found: dict[str, Any] = decode(text, lambda name: tensors[name])
    return found


def test_what_has_changed_is_captured_and_put_back() -> None:
    trainer = Generating()
    kept = SubclassState(trainer, Base)
    assert kept.get() == {}
    for _ in range(3):
        trainer.step()
    trainer.train()
    held = through_json(kept.get())
    assert held.keys() == {"buffered", "count", "metrics", "texts"}
    again = Generating()
    SubclassState(again, Base).put(held)
    assert again.count == 3 and again.base_counter == 0
    assert torch.equal(again.buffered[0]["ids"], torch.full((2, 3), 7)) and again.buffered[0]["mask"] is None
    assert again.buffered[0]["loss"].dtype is torch.bfloat16
    again.metrics["train"]["new"].append(1)  # still makes entries that are missing
    assert again.metrics["train"]["reward"] == [1.5, 1.5, 1.5]
    assert list(again.texts) == ["2", "3"] and again.texts.maxlen == 2


def test_tensors_and_arrays_that_change_in_place_are_captured() -> None:
    trainer = Generating()
    trainer.array = np.zeros(2)  # type: ignore[attr-defined]
    kept = SubclassState(trainer, Base)
    trainer.weights.add_(1)
    trainer.array[0] = 1  # type: ignore[attr-defined]
    assert kept.get().keys() == {"weights", "array"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([torch.ones(1)]),
        lambda: (x for x in [1]),
        lambda: [SimpleNamespace(batch=torch.ones(1))],
        lambda: torch.empty(LARGEST + 1, dtype=torch.uint8),
    ],
)
def test_what_holds_batches_and_is_not_captured_is_refused_by_name(make: Any) -> None:
    trainer = Generating()
    kept = SubclassState(trainer, Base)
    kept.check(set())
    trainer.buffered = make()
    with pytest.raises(ConfigError, match=r"^Generating .*snap\.track\('buffered'"):
        kept.check(set())
    SubclassState(trainer, Base).check(set())  # it was there before
    again = SubclassState(Generating(), Base)
    again._owner.buffered = make()
    again.check({"buffered"})


def test_what_the_framework_assigns_is_left_to_its_integration() -> None:
    trainer = Base()
    kept = SubclassState(trainer, Base)
    trainer.train()
    trainer.base_counter = 9
    assert kept.get() == {}
