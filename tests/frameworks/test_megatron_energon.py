"""Energon's own loader, wrapped as in Megatron-LM's example, in a loop that is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")

from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory

from tests import megatron_lm_loop as loop
from tests.frameworks.test_megatron_lm import goes_on

SAMPLES = 60


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A data set of numbers, in two shards."""
    webdataset: Any = pytest.importorskip("webdataset", reason="megatron-energon is not installed")
    (tmp_path / "parts").mkdir()
    with webdataset.ShardWriter(f"{tmp_path}/parts/data-%d.tar", maxcount=SAMPLES // 2) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:06d}", "txt": str(number).encode()})
    BaseWebdatasetFactory.prepare_dataset(
        EPath(tmp_path), ["parts/data-{0..1}.tar"], split_parts_ratio=[("train", 1.0)]
    )
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    )
    return tmp_path


class Wrapped:
    """The wrapper around Energon's loader in Megatron-LM's example."""

    def __init__(self, dataset: Path, workers: int) -> None:
        config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        samples: Any = get_train_dataset(
            EPath(dataset),
            batch_size=loop.BATCH,
            worker_config=config,
            shuffle_buffer_size=10,
            max_samples_per_sequence=7,
            virtual_epoch_length=5,
        )
        self._dataloader = get_savable_loader(samples)
        self._iter = loop.cyclic_iter(self._dataloader)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> torch.Tensor:
        batch: Any = next(self._iter)
        return torch.tensor([[float(text) / SAMPLES] * 3 for text in batch.text])

    def save_state(self) -> Any:
        """Megatron-LM's half of the hook."""
        return self._dataloader.save_state_rank()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kill", [("step", 8), ("evaluation", 6, 0)])
def test_it_goes_on_where_it_was(
    arena: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, workers: int, kill: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(loop, "External", lambda: Wrapped(dataset, workers))
    goes_on(kill, dataloader_type="external")
