"""What the state of a job is: adapters, tensors, values, optimizers, generators, replicas, and the record of it."""

__all__ = [
    "adapter",
    "audit",
    "flags",
    "hidden",
    "inputs",
    "live",
    "manifest",
    "optimizers",
    "own_generators",
    "reach",
    "record",
    "replicas",
    "rng",
    "shares",
    "steppers",
    "streams",
    "tracked",
    "values",
]
