"""What the state of a job is: adapters, tensors, values, optimizers, generators, replicas, and the record of it."""
