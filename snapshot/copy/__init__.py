"""Moves the bytes of tensors beside training, on CPUs and CUDA, at a pace, and detects what changed meanwhile."""

__all__ = [
    "cuda_runtime",
    "devices",
    "engines",
    "errors",
    "pace",
    "runs",
    "tensors",
    "unit_digests",
    "witness",
]
