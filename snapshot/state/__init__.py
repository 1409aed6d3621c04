"""The state of a job: adapters, tensors, values, optimizers, generators, replicas, and the record in a slot."""

__all__ = [
    "adapter",
    "audit",
    "completeness",
    "digests",
    "hidden",
    "inputs",
    "libraries",
    "live",
    "manifest",
    "named",
    "optimizers",
    "record",
    "replicas",
    "rng",
    "streams",
    "tracked",
    "values",
    "walk",
    "worker_states",
]
