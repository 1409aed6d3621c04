"""Megatron-LM's rerun state machine, which runs an iteration again when one of its results looks wrong.

Megatron-LM's own checkpoints contain it only while a rerun is pending. Between two steps no rerun is pending, except in
a process that was started from such a checkpoint. A rerun that was interrupted is repeated from the iteration's first
run, with the same random numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.state.values import packed, unpacked

GET = "get_rerun_state_machine"
"""The function from which the loop gets the machine."""

CHECKPOINTED = (
    "rerun_requested",
    "checkpoint_requested",
    "restart_again_requested",
    "continue_requested",
    "suspicious_node",
    "suspicious_device",
    "large_value_counts",
    "max_values",
)
"""Attributes with plain values that Megatron-LM's own checkpoint of a pending rerun contains, too."""

NEEDED = (
    *CHECKPOINTED,
    "state",
    "current_iteration",
    "first_iteration_complete",
    "failed_validation_call",
    "initial_result",
    "error_injector",
    "stats",
)
"""Attributes that a machine must have. The command line sets `mode`, and each step sets all others anew."""

NEEDED_OF_MODULE = ("RerunState", "RerunDiagnostic", "Caller", "Call", "QuickStats")

SAMPLED = ("pos", "zero_cnt", "max", "max_size")
"""Attributes of statistics, besides the samples."""


class Reruns:
    """The state of this process's machine. For the training thread only.

    Args:
        machine: Megatron's ``get_rerun_state_machine()``; None: the loop has none.

    Raises:
        ConfigError: the machine's version is not known.
    """

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        if machine is None:
            return
        self._module: Any = sys.modules[type(machine).__module__]
        missing = [f"{type(machine).__name__}.{name}" for name in NEEDED if not hasattr(machine, name)]
        missing += [name for name in NEEDED_OF_MODULE if not hasattr(self._module, name)]
        if missing:
            raise ConfigError(f"{self._module.__name__} has no {', '.join(missing)}: this version of it is not known")

    def get(self) -> dict[str, Any] | None:
        """The state as a step begins; None if the loop has no machine."""
        machine = self._machine
        if machine is None:
            return None
        call, injected = machine.failed_validation_call, machine.error_injector.injected_error_type
        return {name: getattr(machine, name) for name in (*CHECKPOINTED, "current_iteration")} | {
            "state": machine.state.name,
            "first_iteration_complete": machine.first_iteration_complete,
            "failed_validation_call": None if call is None else [list(call.caller), call.sequence],
            "initial_result": packed(machine.initial_result),  # as a tensor, the first one would change the layout
            "injected_error_type": None if injected is None else injected.value,
            "stats": [[list(caller), _sampled(stats)] for caller, stats in machine.stats.items()],
        }

    def set(self, held: dict[str, Any] | None, *, same_iteration: bool) -> None:
        """Take over what was restored.

        The machine keeps what the command line sets: its mode, and which errors are injected.

        Args:
            same_iteration: whether a checkpoint was loaded before, of exactly the iteration at which the loop resumes.
                If a rerun is pending in it, that stays: Megatron wrote it after the snapshot, and exited for the rerun.
        """
        machine = self._machine
        if machine is None or held is None:
            return
        module = self._module
        machine.first_iteration_complete = held["first_iteration_complete"]
        for caller, sampled in held["stats"]:
            stats = machine.stats[module.Caller(*caller)] = module.QuickStats()
            stats.samples = sampled["samples"].tolist()
            for name in SAMPLED:
                setattr(stats, name, sampled[name])
        if same_iteration and machine.state is not module.RerunState.NOT_RUNNING_YET:
            return
        for name in (*CHECKPOINTED, "current_iteration"):
            setattr(machine, name, held[name])
        machine.state = module.RerunState[held["state"]]
        machine.data_iterator_checkpoints = None  # earlier batches, which the next step would drop anyway
        machine.initial_result = unpacked(held["initial_result"], torch.device("cuda"))
        call, injected = held["failed_validation_call"], held["injected_error_type"]
        machine.failed_validation_call = None if call is None else module.Call(module.Caller(*call[0]), call[1])
        if machine.error_injector.should_inject_errors:
            machine.error_injector.injected_error_type = None if injected is None else module.RerunDiagnostic(injected)


def _sampled(stats: Any) -> dict[str, Any]:
    return {"samples": np.array(stats.samples, dtype=np.float64)} | {name: getattr(stats, name) for name in SAMPLED}
