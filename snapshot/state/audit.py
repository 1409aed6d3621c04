"""The training process's part in ``holdfast audit``, and in chaos against a user's own command.

It records everything that the loop can reach, and kills or ends the process after a given step. It is requested through
the environment; see `holdfast.audit` and `holdfast.chaos.user.run` for the other part.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.settings import AUDIT
from holdfast.snapshot.state import rng, streams
from holdfast.snapshot.state.reach import Theirs, plain, reachable

DRAIN_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class AuditOrders:
    """What to do in one run.

    Attributes:
        notes: a folder in which each rank writes a file.
        stop: number of steps after which the process ends with status 0.
        kill: number of steps after which the process is killed, in the middle of the next step; 0: never.
    """

    notes: str
    stop: int
    kill: int = 0

    def to_environment(self) -> dict[str, str]:
        """The environment variables that make a hook follow these orders."""
        return {AUDIT.variable: json.dumps({"notes": self.notes, "stop": self.stop, "kill": self.kill})}


class StepsDone(BaseException):
    """All steps are done, in a process that must not end; see `raise_at_the_end`."""


_raises = False


def raise_at_the_end() -> None:
    """Make the last step of an audit raise `StepsDone` instead of ending this process, which would be started again."""
    global _raises
    _raises = True


def orders_from_environment() -> AuditOrders | None:
    """The orders for this process; None outside an audit. Raises `ConfigError` if they are malformed."""
    text = AUDIT.text()
    if not text:
        return None
    try:
        return AuditOrders(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{AUDIT.variable}={text!r} is not what `holdfast audit` sets: {error}") from None


class Auditor:
    """Follows the orders on one rank. Called by the hook, in the training thread."""

    def __init__(
        self,
        orders: AuditOrders,
        rank: int,
        epoch: int,
        step: int,
        modules: Sequence[torch.nn.Module],
        drain: Callable[[float], bool],
        protected: Callable[[], int | None],
        theirs: Theirs,
    ) -> None:
        """
        Args:
            step: the step that this epoch began with.
            protected: returns the newest step that is known to be protected.
            theirs: the values that frameworks restore themselves.
        """
        self._orders = orders
        self._drain = drain
        self._protected = protected
        self._theirs = theirs
        self._file = Path(orders.notes, f"rank{rank}.jsonl").open("a", buffering=1)  # noqa: SIM115
        self._modules = modules
        self._settled = self._computed = -1
        self._outputs: list[str] = []
        self._file.write("\n")  # a predecessor may have been killed in the middle of a line
        self._note({"epoch": epoch, "start": step, "pid": os.getpid()})
        for module in modules:
            module.register_forward_hook(self._saw_outputs)

    def settled(self, step: int) -> None:
        """The step after `step` begins: everything that `step` changed has its final value."""
        if self._settled == step:
            return
        self._settled = step
        values = reachable(sys._getframe(1), self._theirs)
        values |= {f"random.{name}": digest for name, digest in streams.digests(rng.capture()).items()}
        self._note({"step": step, "values": values, "protected": self._protected()})

    def before_step(self, step: int) -> None:
        """The step after `step` has computed its gradients."""
        if self._computed == step:
            return  # another optimizer of the same step
        self._computed = step
        self.settled(step)
        gradients = {}
        for i, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                gradient = getattr(parameter, "main_grad", parameter.grad)
                if gradient is not None:
                    gradients[f"gradient of model{i}.{name}"] = plain(gradient)
        outputs = {f"output {i} of the model": text for i, text in enumerate(self._outputs)}
        self._outputs.clear()
        self._note({"step": step + 1, "computed": outputs | gradients})
        failpoint("train.step", step + 1)
        if self._orders.kill and step == self._orders.kill:
            self._drain(DRAIN_DEADLINE_S)
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, step: int, meet: Callable[[], Any]) -> None:
        """A step is done. After the last step every rank ends, once all ranks have arrived."""
        if step < self._orders.stop:
            return
        meet()
        self._file.close()
        if _raises:
            raise StepsDone(f"all {step} steps of an audit are done")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _saw_outputs(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        found = outputs if isinstance(outputs, tuple | list) else [outputs]
        self._outputs += [plain(each) or "" for each in found if isinstance(each, torch.Tensor)]

    def _note(self, what: dict[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")
