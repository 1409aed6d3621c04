"""Errors that stay within the training process."""

from __future__ import annotations

from holdfast.smp_daemon.shared.errors import HoldfastError


class GivenUp(HoldfastError):
    """A snapshot is given up because it would not be exact. The hook tells the loop why."""


class LayoutChanged(HoldfastError):
    """The state has other leaves, or longer plain values, than the slots were laid out for: a new layout is needed."""
