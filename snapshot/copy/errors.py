"""Errors that stay within the training process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdfast.smp_daemon.shared.errors import HoldfastError


class GivenUp(HoldfastError):
    """A snapshot is given up because it would not be exact. The hook tells the loop why."""


class LayoutChanged(HoldfastError):
    """The state has other leaves, or longer plain values, than the slots were laid out for: a new layout is needed."""


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """In this block memory for copies is asked of a device. If it has none left, that is no error of the training:
    `GivenUp`, which names `what` was to be copied."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GivenUp(f"no memory is left on the device for a copy of {what}: {error}") from error
