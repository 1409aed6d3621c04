"""Training loops drawn from seeds: run undisturbed, run with kills, and compared to the last bit.

`draw` makes a loop from a seed, `script` writes it as a program, `life` runs the program in a process of its own,
`trial` starts those processes and the SMP, and `judge` determines the outcome. ``python -m tests.proof.loops`` runs
many seeds.
"""
