"""Deterministic simulation: a whole job, its SMPs, its network and its clock in one process, driven by a seed.

The code under test is the production code, unchanged: each of its threads is a *task*, of which exactly one runs at a
time, and which one is drawn from the seed (`chaos.sim.scheduler`). SMPs are given a `System` whose locks, events,
queues, pools and clock are the scheduler's (`threads`). What cannot be handed in yet is replaced through the names by
which modules know it (`chaos.sim.seams`): sockets (`network`), gRPC (`rpc`), the files of arenas, which lie in memory
(`memory`), and the trainer's threads. Faults are drawn too (`plan`, `faults`), and an oracle that shares no code
with what it judges compares the outcome with the promise (`oracle`).

It must never be imported by anything outside `chaos`. Begin reading at `run`.
"""
