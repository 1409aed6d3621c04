"""The training process's part in ``holdfast audit``, and in chaos against a user's own command.

It records everything that the loop can reach, and kills or ends the process after a given step. It is requested through
the environment; see `holdfast.audit` and `holdfast.chaos.user.run` for the other part.

The walk covers the local variables of the functions on the stack and everything they refer to: modules, optimizers,
containers, and attributes of objects, tensors or not. It never uses an object's ``repr``, which may hold an address.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.settings import AUDIT
from holdfast.snapshot.state import rng, streams
from holdfast.snapshot.state.digests import digest_of, form_of
from holdfast.snapshot.state.walk import GENERATORS, LIBRARIES, home_of, is_generator, is_installed, package_of, walk

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
        theirs: Collection[str],
    ) -> None:
        """
        Args:
            step: the step that this epoch began with.
            protected: returns the newest step that is known to be protected.
            theirs: packages that restore what their objects hold, see `_are_theirs`.
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


MOST = 200_000
"""Maximum number of values that are recorded."""

SHORT = 60
"""Plain values of up to this many characters are shown as they are, longer ones as a digest."""

DEEPEST = 1000
"""How many levels are opened."""

GENERATOR = "generator"
"""What the text of a random generator begins with."""

COMPUTED_WITH = (torch.Tensor, np.ndarray, *GENERATORS)
"""Types of values that the loop computes with; all other leaves are plain values."""

OURS = frozenset(
    {
        *("holdfast.snapshot", "holdfast.integrations", "holdfast.smp_daemon", "holdfast.ec"),
        *("torch", "importlib", "runpy", "threading"),
    }
)
"""Packages whose functions and objects are not searched for values of the user."""

INSIDE = (
    "torch.nn.",
    "torch.optim.",
    "torch.distributed.optim.",
    "torch.distributed.algorithms.",
    "torch.utils.data.",
    "torch.amp.",
)
"""Modules whose objects are searched all the same."""


def reachable(frame: FrameType | None = None, theirs: Collection[str] = ()) -> dict[str, str]:
    """Everything that the functions on the stack can reach, from `frame` (default: the caller) outwards.

    Gives a text for each value by its name; texts are equal only if the values are. Blocks for about one read of all
    tensors.
    """
    found: dict[str, str] = {}
    texts: dict[int, tuple[torch.Tensor, str]] = {}  # keeps tensors alive, so that no id is reused
    for each, _ in walk_stack(frame or sys._getframe(1)):
        package = package_of(str(each.f_globals.get("__name__", "")))
        if package not in OURS and package not in theirs:
            where = each.f_code.co_name.strip("<>")
            for name, value in list(each.f_locals.items()):
                if not name.startswith("__"):
                    _look_into(f"{where}.{name}", value, theirs, found, texts)
    return found


def _look_into(
    path: str, value: Any, packages: Collection[str], found: dict[str, str], texts: dict[int, tuple[torch.Tensor, str]]
) -> None:
    """One walk, which adds to `found` and `texts`. It visits an object once per variable that leads to it: a variable
    that only one of two runs has must not change the names of anything else."""
    theirs: dict[int, bool] = {}  # whether a framework restores the plain values in what was opened
    for place, part, holder in walk([(path, value)], _is_opened, deepest=DEEPEST, most=MOST):
        if len(found) >= MOST:
            return
        held = theirs.get(id(holder), False)
        if isinstance(part, torch.Tensor) and id(part) not in texts:
            texts[id(part)] = part, plain(part) or ""
        text = texts[id(part)][1] if isinstance(part, torch.Tensor) else plain(part)
        if text is None:
            theirs.setdefault(id(part), _are_theirs(part, held, packages))
        elif not held or isinstance(part, COMPUTED_WITH):
            found.setdefault(place, text)


def _are_theirs(value: Any, held: bool, packages: Collection[str]) -> bool:
    """Whether a framework restores the plain values in `value`. `held`: whether the object that holds `value` is such
    an object itself.

    A framework whose integration is in use, such as a `Trainer`, resumes from its own counters. So the walk skips the
    variables of its functions and the plain values in its objects, and in other installed packages' objects that these
    hold: positions in loops, progress bars. It keeps everything that is computed with: tensors, arrays and generators
    anywhere, modules and optimizers, and all objects of the user's own classes.
    """
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return held
    module = type(value).__module__
    package = package_of(module)
    if package in packages:
        return True
    return held and not f"{module}.".startswith(INSIDE) and is_installed(package)


def plain(value: Any) -> str | None:
    """A text that identifies a value, or None if its parts must be looked at one by one."""
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return f"{form_of(value)} {_digest(value)}"
    if is_generator(value):
        return f"{GENERATOR} {_digest(value)}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | torch.dtype):
        is_long = isinstance(value, int) and value.bit_length() > SHORT  # decimal is slow
        text = _digest(value) if is_long else repr(value)
        return text if len(text) <= SHORT else _digest(value)
    return None


def _is_opened(value: Any) -> bool:
    if callable(value) and not hasattr(value, "forward"):
        return False
    package = home_of(value)
    if package in OURS:
        return f"{type(value).__module__}.".startswith(INSIDE)
    return package not in LIBRARIES - {"torch"} and package != "grpc"


def _digest(value: Any) -> str:
    return digest_of(value)[:16]
