"""The bytes of tensors, and what moves them beside training: on CPUs and CUDA, at what pace, and what changed."""

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
