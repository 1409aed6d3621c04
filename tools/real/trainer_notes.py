"""A module for ``--first``: notes the evaluations and logs of ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from tools.real.probe import Probe, digest

MEASURED = ("_runtime", "_per_second", "memory", "total_flos")
"""Parts of names of values that measure the run itself and so differ between runs."""


def watch(probe: Probe) -> None:
    """Note the trainer's evaluations, and add its log to the final state."""
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
