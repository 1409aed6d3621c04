"""A module for ``--first``: for scripts without an optimizer, whose steps are seen by their calls of ``backward``."""

from __future__ import annotations

from typing import Any

import torch

from tools.real.probe import Probe, digest, generators


def watch(probe: Probe) -> None:
    """Note and report a step with each call of ``backward``: what it did to the weights shows in the next loss."""
    backward = torch.autograd.backward

    def stepping(tensors: Any, *arguments: Any, **named: Any) -> None:
        probe.hold()
        backward(tensors, *arguments, **named)
        probe.note("step", {f"generator {name}": digest(state) for name, state in generators().items()})
        probe.tell("step")

    torch.autograd.backward = stepping
