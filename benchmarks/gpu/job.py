"""A training loop that kills itself at a given point, to test its restart: see `benchmarks.gpu.right`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.machine import Machine
from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.snapshot.step import copier
from holdfast.snapshot.step.copier import Copier
from tests.proof.device.seam import DRAIN_S, SeamLoop, Training

POINTS = ("forward", "copy", "step", "seal")
"""Points of death: in a forward pass, during the copy of the state, in the middle of the optimizer's step, and just
before a slot is sealed."""

STEPS = 12


def main() -> None:
    """Train; write the loss of each step and a digest of the final state to the notes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--arena", type=Path)
    parser.add_argument("--die", choices=POINTS)
    parser.add_argument("--at", type=int, default=7)
    asked = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    device = Machine(asked.dry).device
    with device.installed():
        training = Training(device, SeamLoop(steps=STEPS))
        if asked.arena is None:
            _train(training, asked.notes, None)
            return
        hook = InMemorySnapshot(training.model, training.optimizer, job="gpu", arena=asked.arena, strict=True)
        hook.track("average", tensors=training.average, changes="after step")
        with _armed(training, asked.die, asked.at) if asked.die else nullcontext(), hook as snap:
            _train(training, asked.notes, snap)


def _train(training: Training, notes: Path, snap: InMemorySnapshot | None) -> None:
    def note(step: int, loss: float) -> None:
        with notes.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")

    def begins(step: int) -> None:
        if snap is not None:
            snap.drain(DRAIN_S)

    training.run(begins, range if snap is None else snap.steps, note)
    digest = hashlib.sha256(b"".join(training.state().values())).hexdigest()
    with notes.open("a") as file:
        file.write(json.dumps({"digest": digest}) + "\n")


def _armed(training: Training, point: str, at: int) -> Any:
    """Kill this process when it reaches the point in step `at`."""

    def die(*ignored: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def in_step(module: torch.nn.Module, given: Any) -> None:
        if training.step == at:
            die()

    if point == "forward":
        training.model[-1].register_forward_pre_hook(in_step)
        return nullcontext()
    if point == "step":
        # It must not refer to `training`, whose emulated device keeps a generator: that would be state of the job.
        step, [first, *_], left = training.optimizer.step, training.model.parameters(), at

        def half(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if not left:
                first.data.mul_(1.5)  # dies with some weights changed and others not
                die()
            left -= 1
            return step(*args, **kwargs)

        return patch.object(training.optimizer, "step", half)
    if point == "seal":
        seal = Copier._seal
        return patch.object(Copier, "_seal", lambda own, job: die() if job.snapshot.step == at else seal(own, job))
    return patch.object(
        copier, "failpoint", lambda name, step: die() if (name, step) == ("copy.middle", at) else failpoint(name, step)
    )


if __name__ == "__main__":
    main()
