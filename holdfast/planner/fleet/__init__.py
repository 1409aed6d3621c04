"""A job of a thousand to a hundred thousand GPUs over months, in virtual time: how much of it trains, and why not all.

Nothing here starts a process, reads a clock or touches a network; it is arithmetic under a seed. Start with
`fleet.engine`, which goes from failure to failure; `fleet.strategies` says what each way to protect a job
costs and survives, `fleet.copies` which copies are left, `fleet.progress` what a job has done and saved by
when, `fleet.failures` what fails when. `fleet.sweep` runs a table of them, and `fleet.published`
repeats what others have measured.
"""

__all__ = ["failures", "job", "published", "strategies", "sweep"]
