"""What a job's snapshots need, and what they give: the interval, the code, slots, memory, cores. Pure; starts nothing.

Start with `holdfast.planner.plan`. `costs` says what a snapshot takes, `survival` what a code is worth, `model` how
many bytes a model has, `rates` how fast an SMP is, `montecarlo` plays a plan, and `reasons` explains it.
"""
