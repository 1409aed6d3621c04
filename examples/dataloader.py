"""The README's loop with a plain shuffled DataLoader: run it, kill it with ``kill -9`` at any moment, run it again.

``HOLDFAST_JOB=dataloader python -m holdfast.examples.dataloader``. Two worker processes read and augment the samples.
The schedule is stepped once an epoch. The validation after each epoch draws from the same generator as dropout.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast import InMemorySnapshot

EPOCHS, SAMPLES, BATCH, WIDTH = 4, 500, 16, 32


class Spirals(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points on two spirals, with new noise each time a point is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind = index % 2
        angle = torch.tensor(index / SAMPLES * 9.0)
        point = torch.stack([angle.cos(), angle.sin()]) * angle * (1 - 2 * kind)
        return point + 0.1 * torch.randn(2), torch.tensor(kind)


def validate(model: nn.Module) -> float:
    """The fraction of 64 random points that the model assigns to the first spiral."""
    model.eval()
    with torch.no_grad():
        on_first = model(9 * torch.randn(64, 2)).argmax(1) == 0
    model.train()
    return float(on_first.float().mean())


def main() -> None:
    os.environ.setdefault("HOLDFAST_JOB", "dataloader")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2)
    )
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    loader = DataLoader(Spirals(), batch_size=BATCH, shuffle=True, num_workers=2)

    with InMemorySnapshot(model, optim, scheduler=scheduler) as snap:
        for epoch in range(snap.epoch, EPOCHS):
            for x, y in snap.data(loader):
                loss = nn.functional.cross_entropy(model(x), y)
                torch.autograd.backward(loss)
                print(f"step {snap.step}: epoch {epoch}, loss {float(loss.item()).hex()}", flush=True)
                optim.step()
                optim.zero_grad()
            print(f"epoch {epoch}: {validate(model):.3f} on the first spiral", flush=True)
            scheduler.step()
        total = float(torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum())
    print(f"{EPOCHS} epochs; sum of all weights {total.hex()}")


if __name__ == "__main__":
    main()
