"""What the checks of a trial are called, and what each holds: of `chaos.user.command` and of `tests.proof.chaos`."""

from __future__ import annotations

PROMISES = {
    "ends": "the job ends in time",
    "refuses": "if more is lost than parity makes up for, the job says so and does not start anew",
    "returns": "else it comes back from every fault, and ends well",
    "result": "every loss, every gradient and the final state are those of the undisturbed job, bit for bit",
    "together": "all ranks of a start go on from the same step",
    "kept": "no step that was protected is lost",
    "again": "no more finished steps are done again than may be",
    "persisted": "if memory is lost, what was persisted comes back",
    "whole": "no shard is damaged unless a bit was flipped",
    "smps": "an SMP ends by the signal that it is sent",
    "leaks": "nothing is left behind",
    "expected": "no SMP meets an error that it does not expect",
}
"""The checks of the product, by name. A build that is broken on purpose names the check that must notice it."""

TRIALS = {
    "struck": "every fault that was asked for was done",
    "met": "what impairs a network met packets",
    "seen": "a clock that was set was read",
}
"""The checks of the trial itself, since a fault that does nothing shows nothing."""

CHECKS = PROMISES | TRIALS
