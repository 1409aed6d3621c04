"""A Megatron GPT under torchrun. Kill a trainer and run the same command again: training resumes bit for bit.

``HOLDFAST_JOB=gpt torchrun --nproc-per-node 4 -m holdfast.examples.megatron_gpt --steps 50``. It needs
``pip install 'holdfast-train[megatron]'``.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from holdfast import InMemorySnapshot
from holdfast.chaos.gpt import MICRO_BATCH, MICRO_BATCHES, SEQUENCE, batches, build, forward_step, initialise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--restore-step", type=int, help="go back to the snapshot of that step, not to the newest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    initialise(args.seed)
    model, optimizer, scheduler = build()

    with InMemorySnapshot(model, optimizer, scheduler=scheduler, restore_step=args.restore_step) as snap:
        for step in snap.steps(args.steps):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches(args.seed, step),
                model=model[0],
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=MICRO_BATCH,
                forward_only=False,
            )
            updated, _, _ = optimizer.step()
            if updated:
                scheduler.step(increment=1)
            if dist.get_rank() == 0:
                loss = torch.stack([part["lm loss"] for part in losses]).mean()
                print(f"step {step + 1} loss {loss:.4f} protected {snap.protected_step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
