"""Deterministic simulation: a whole job, its SMPs, its network and its clock in one process, driven by a seed.

The code under test is the production code, unchanged. Each of its threads is a *task*; exactly one task runs at a time,
and the seed decides which (`sim.scheduler`). Trainers and SMPs are handed a `System` (`system`) with simulated
locks, events, queues, pools and clock (`threads`), sockets (`network`) and gRPC (`rpc`), and with arenas in memory
(`memory`). A few of holdfast's own names are patched (`seams`). The seed also decides the faults (`plan`, `faults`). An
oracle that shares no code with the code under test compares the outcome with the promise (`oracle`).

Nothing outside `chaos` may import this package. Start reading at `run`.
"""
