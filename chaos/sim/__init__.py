"""Deterministic simulation: a whole job, its SMPs, its network and its clock in one process, driven by a seed.

The code under test is the production code, unchanged: each of its threads is a *task*, of which exactly one runs at a
time, and which one is drawn from the seed (`chaos.sim.scheduler`). What threads block on is replaced through the names
by which the modules know it (`chaos.sim.seams`): locks, events, queues and pools (`threads`), sockets (`network`), gRPC
(`rpc`), time, and the files of arenas, which lie in memory (`memory`). Faults are drawn too (`plan`, `faults`), and an
oracle that shares no code with what it judges compares the outcome with the promise (`oracle`).

It must never be imported by anything outside `chaos`. Begin reading at `run`.
"""
