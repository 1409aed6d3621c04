"""The state of a job: adapters, tensors, values, optimizers, generators, replicas, and the record in a slot."""
