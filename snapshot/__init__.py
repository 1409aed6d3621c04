"""The training side: what a rank's state is, how it is copied while the next step runs, how it comes back.

It talks to the SMP only through `shared.client`, and to the frameworks only through `state.adapter`. Start
with `snapshot.hook`; the decisions are in the pure modules `step.ledger`, `snapshot.plan`, `resume.arrange`.
"""
