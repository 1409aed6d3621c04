"""A transformers.Trainer that may be killed at any moment: run it, kill it with ``kill -9``, run it again.

``HOLDFAST_JOB=huggingface python -m holdfast.examples.huggingface_trainer``. It needs
``pip install 'holdfast-train[huggingface]'``.
"""

from __future__ import annotations

import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.integrations.huggingface import protect


def main() -> None:
    os.environ.setdefault("HOLDFAST_JOB", "huggingface")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    rows = torch.randint(0, 64, (512, 16))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=16,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        protect(trainer)
        trainer.train()
    total = float(torch.cat([p.detach().flatten() for p in model.parameters()]).sum())
    print(f"{trainer.state.global_step} steps; sum of all weights {total.hex()}")


if __name__ == "__main__":
    main()
