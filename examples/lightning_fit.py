"""A Lightning fit that may be killed at any moment: run it, kill it with ``kill -9``, run it again.

``HOLDFAST_JOB=lightning python -m holdfast.examples.lightning_fit``. It needs
``pip install 'holdfast-train[lightning]'``.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import InMemoryCallback


class Autoencoder(pl.LightningModule):  # type: ignore[misc, unused-ignore]
    """An ordinary module that knows nothing of snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 32))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        return torch.nn.functional.mse_loss(self.layers(x), x)

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch} is done", flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=1024)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    os.environ.setdefault("HOLDFAST_JOB", "lightning")
    pl.seed_everything(0)
    data = DataLoader(TensorDataset(torch.randn(1024, 32)), batch_size=8, shuffle=True)
    memory = InMemoryCallback()
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[memory],
    )
    model = Autoencoder()
    trainer.fit(model, data)
    total = float(torch.cat([p.detach().flatten() for p in model.parameters()]).sum())
    print(f"{trainer.global_step} steps; sum of all weights {total.hex()}")


if __name__ == "__main__":
    main()
