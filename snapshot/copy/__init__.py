"""Moves the bytes of tensors beside training, on CPUs and CUDA, at a pace, and detects what changed meanwhile."""
