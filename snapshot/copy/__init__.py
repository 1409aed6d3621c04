"""Moves the bytes of tensors beside training, on CPUs and CUDA, at a pace, and detects what changed meanwhile."""

__all__ = [
    "cuda",
    "cuda_driver",
    "cuda_runtime",
    "devices",
    "engines",
    "errors",
    "pace",
    "pages",
    "runs",
    "tensors",
    "witness",
]
