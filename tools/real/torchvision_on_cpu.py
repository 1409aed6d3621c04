"""A module for ``--first``: lets torchvision be imported where its wheel, made for CUDA, brings no operators."""

from __future__ import annotations

import torch


def watch(probe: object) -> None:
    """Declare the operators that torchvision describes when it is imported; none of them is called."""
    declare()


def declare() -> None:
    """Declare them, unless torchvision has brought them."""
    if not hasattr(torch.ops.torchvision, "nms"):
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float most) -> Tensor")
