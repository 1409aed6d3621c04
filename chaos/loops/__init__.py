"""Training loops drawn from seeds: run undisturbed, run killed, and compared to the last bit.

`draw` makes a loop from a seed, `script` writes it down as the program that runs, `life` runs it in a process of its
own, `trial` starts those processes and the SMP, `judge` says what came of it. ``python -m holdfast.chaos.loops`` runs
many.
"""
