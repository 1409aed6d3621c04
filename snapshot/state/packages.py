"""Which package a module belongs to. Each part of holdfast counts as a package of its own."""

from __future__ import annotations

PARTS = frozenset({"snapshot", "smp_daemon", "ec", "integrations", "chaos"})


def package_of(module: str) -> str:
    """``torch`` for ``torch.nn.init``, ``holdfast.ec`` for ``holdfast.ec.codec``, ``holdfast`` for ``holdfast.cli``."""
    first, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return f"{first}.{part}" if first == "holdfast" and part in PARTS else first
