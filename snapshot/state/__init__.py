"""The state of a job: adapters, tensors, values, optimizers, generators, replicas, and the record in a slot."""

__all__ = [
    "adapter",
    "audit",
    "completeness",
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
