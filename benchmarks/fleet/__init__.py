"""Simulates months of a job on 1,000 to 100,000 GPUs in virtual time: how much of it trains, and where the rest goes.

Nothing here starts a process, reads a clock or touches a network; results depend only on the seed. Start with
`fleet.engine`, which goes from failure to failure. `fleet.strategies` has the costs of each way to protect a job, and
what each survives; `fleet.copies` keeps track of the copies that are left, `fleet.progress` of what a job has done and
saved; `fleet.failures` draws the failures. `fleet.sweep` runs a table of simulations, and `fleet.published` reproduces
published measurements.
"""
