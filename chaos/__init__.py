"""Breaks jobs on purpose: virtual nodes on one machine, faults at exact points, and verdicts on the outcome.

Start with `chaos.cluster`, one of three backends that run virtual nodes; the others are `chaos.user` and
`tests.proof.ray`, and all share `chaos.runner`. `chaos.faults` is the catalogue of faults that users see;
`tests.proof.chaos` has many more, and namespaces and wall clocks for nodes whose network or clock is to break.
`chaos.zygote` is the launcher's process, which imports once and forks trainers; `chaos.trainer` is a forked trainer's
view of its cluster.
"""
