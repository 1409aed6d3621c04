"""The training side: what a rank's state is, how it is copied while the next step runs, how it comes back.

It talks to the SMP only through `smp_daemon.client`, and to the frameworks only through `snapshot.adapter`. Start
with `snapshot.hook`; the decisions are in the pure modules `snapshot.ledger`, `snapshot.plan`, `snapshot.arrange`.
"""
