"""Which package a module is of: the library's own parts are told from each other, and from what is the user's."""

from __future__ import annotations

PARTS = frozenset({"snapshot", "smp_daemon", "ec", "integrations", "chaos"})


def package_of(module: str) -> str:
    """``torch.nn.init`` is of ``torch``, ``holdfast.ec.codec`` of ``holdfast.ec``, ``holdfast.cli`` of ``holdfast``."""
    first, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return f"{first}.{part}" if first == "holdfast" and part in PARTS else first
