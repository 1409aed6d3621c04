"""A job of a thousand to a hundred thousand GPUs over months, in virtual time: how much of it trains, and why not all.

Nothing here starts a process, reads a clock or touches a network; it is arithmetic under a seed. Start with
`chaos.fleet.engine`, which goes from failure to failure; `chaos.fleet.strategies` says what each way to protect a job
costs and survives, `chaos.fleet.copies` which copies are left, `chaos.fleet.progress` what a job has done and saved by
when, `chaos.fleet.failures` what fails when. `chaos.fleet.sweep` runs a table of them, and `chaos.fleet.published`
repeats what others have measured.
"""
