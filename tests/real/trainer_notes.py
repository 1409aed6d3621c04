"""``--first``: has the evaluations and the logs of ``transformers.Trainer`` noted."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from tests.real.probe import Probe, digest

MEASURED = ("_runtime", "_per_second", "memory", "total_flos")
"""Ends or parts of names of what a run takes; it is never the same twice."""


def watch(probe: Probe) -> None:
    """Note what the trainer finds, and have what it logged among the final state."""
    evaluate, train = Trainer.evaluate, Trainer.train

    def evaluating(self: Any, *arguments: Any, **named: Any) -> Any:
        found = evaluate(self, *arguments, **named)
        probe.note("eval", digest(_kept(found)))
        probe.tell("eval")
        return found

    def training(self: Any, *arguments: Any, **named: Any) -> Any:
        found = train(self, *arguments, **named)
        probe.keep("log", lambda: [_kept(each) for each in self.state.log_history])
        probe.keep("operations", lambda: self.state.total_flos)
        return found

    Trainer.evaluate, Trainer.train = evaluating, training


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not any(part in name for part in MEASURED)}
