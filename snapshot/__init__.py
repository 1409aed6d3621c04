"""The training side: what a rank's state is, how it is copied while the next step runs, and how it is restored.

It talks to the SMP only through `smp_daemon.shared`, and to the frameworks only through `snapshot.state.adapter`. Start
with `snapshot.hook`. The decisions are in pure modules: `snapshot.step.ledger`, `snapshot.resume.arrange`,
`smp_daemon.shared.plan`.
"""

__all__ = ["connect", "first_turns", "hook", "memory", "options"]
