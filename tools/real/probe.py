"""``python -m tools.real.probe [--first MODULE]... [-m MODULE | SCRIPT] ...``: runs a script and records what it does.

Independent of holdfast. The notes of each process of a rank are one file; a line is a kind and a value:

    loss   the differentiated value as `float.hex`, on every call of ``backward``
    step   digests of parameters, optimizer state and options, and of generators, after every step of an optimizer
    said   a line on standard output that matches ``REAL_SAID``
    final  once, if the script ends well: digests of the final state, by name

``--first`` names modules whose ``watch`` is called with the probe before the script. Every ``start``, ``step``,
``eval`` and ``end`` is reported to the driver through a named pipe.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import random
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from tools.real.driver import PIPE

NOTES, SAID = "REAL_NOTES", "REAL_SAID"
"""Names of environment variables: the folder of notes, and the regular expression of lines to note."""


class Probe:
    """The notes of this process."""

    def __init__(self, folder: Path, pipe: str | None, rank: int) -> None:
        self._rank = rank
        number = len(list(folder.glob(f"rank{rank}-*.jsonl")))
        self._file = os.open(
            folder / f"rank{rank}-{number}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644
        )
        self._pipe = os.open(pipe, os.O_WRONLY) if pipe else None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._held: list[Any] = []
        self._kept: dict[str, Callable[[], Any]] = {}

    def note(self, kind: str, value: Any) -> None:
        """Write one line, in a single call, so that a kill leaves only complete lines."""
        os.write(self._file, (json.dumps([kind, value]) + "\n").encode())

    def tell(self, kind: str) -> None:
        """Report to the driver."""
        if self._pipe is not None:
            os.write(self._pipe, f"{kind} {self._rank} {os.getpid()}\n".encode())

    def keep(self, name: str, value: Callable[[], Any]) -> None:
        """Add the digest of what `value()` returns at the end to the final state."""
        self._kept[name] = value

    def backward(self, tensors: Any) -> None:
        """Note the losses of a call of `torch.autograd.backward`."""
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            self.note("loss", float(tensor.detach()).hex() if tensor.numel() == 1 else digest(tensor))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the state after a step of a torch optimizer, and report it."""
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
            self.hold()
        parts = {"optimizer": state_of(optimizer), **{f"generator {n}": g for n, g in generators().items()}}
        self.note("step", {name: digest(part) for name, part in parts.items()})
        self.tell("step")

    def end(self) -> None:
        """Note the final state after the script has ended well, and report it."""
        self.hold()
        final = {name: digest(value()) for name, value in self._kept.items()} | {
            f"generator {name}": digest(state) for name, state in generators().items()
        }
        found: dict[str, list[str]] = {}
        for thing in [*self._optimizers, *self._held]:
            found.setdefault(type(thing).__qualname__, []).append(digest(state_of(thing)))
        self.note("final", final | {name: sorted(digests) for name, digests in found.items()})
        self.tell("end")

    def hold(self) -> None:
        """Keep references to all current modules and schedules, which may be freed before the script ends."""
        found: list[Any] = [thing for thing in gc.get_objects() if _is(thing, torch.nn.Module, LRScheduler)]
        inner = {id(part) for each in found if isinstance(each, torch.nn.Module) for part in each.children()}
        known = {id(each) for each in self._held}
        self._held += [each for each in found if id(each) not in inner | known and _has_state(each)]


def _is(thing: Any, *kinds: type) -> bool:
    """`isinstance` by the real type, as asking a proxy for its class may have side effects."""
    return issubclass(type(thing), kinds)


def _has_state(thing: Any) -> bool:
    return not isinstance(thing, torch.nn.Module) or next(thing.parameters(), None) is not None


def state_of(thing: Any) -> Any:
    """The state of a module, an optimizer or a schedule, as nested containers."""
    match thing:
        case torch.nn.Module():
            return [list(thing.named_parameters()), list(thing.named_buffers())]
        case torch.optim.Optimizer():
            return [
                [{name: value for name, value in group.items() if name != "params"}, _of_parameters(thing, group)]
                for group in thing.param_groups
            ]
        case _:
            return {name: value for name, value in vars(thing).items() if _is(value, int, float, list, dict)}


def _of_parameters(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[Any]:
    return ([parameter, optimizer.state.get(parameter, {})] for parameter in group["params"])


def generators() -> dict[str, Any]:
    """The states of the global random generators."""
    return {"Python": random.getstate(), "NumPy": np.random.get_state(), "torch": torch.get_rng_state()}


def digest(value: Any) -> str:
    """A digest of everything in nested containers and tensors, exact to the last bit."""
    made = hashlib.blake2b(digest_size=16)
    _put(value, made.update)
    return made.hexdigest()


def _put(value: Any, put: Callable[[bytes], Any]) -> None:
    put(type(value).__name__.encode())
    match value:
        case torch.Tensor():
            tensor = value.detach()
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            put(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            put(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        case np.ndarray():
            put(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        case dict():
            for key in sorted(value, key=str):
                put(str(key).encode())
                _put(value[key], put)
        case list() | tuple() | Iterator():
            for part in value:
                _put(part, put)
        case float():
            put(value.hex().encode())
        case None | bool() | int() | str() | bytes():
            put(repr(value).encode())
        case _:
            put(type(value).__qualname__.encode())  # a repr may contain an address


def watch(probe: Probe, said: str | None) -> None:
    """Install the hooks that note what the script does."""
    backward = torch.autograd.backward

    def noting(tensors: Any, *arguments: Any, **named: Any) -> None:
        probe.backward(tensors)
        backward(tensors, *arguments, **named)

    torch.autograd.backward = noting
    register_optimizer_step_post_hook(lambda optimizer, arguments, named: probe.stepped(optimizer))
    if said:
        wanted, write = re.compile(said), sys.stdout.write

        def writing(text: str) -> int:
            for line in text.splitlines():
                if wanted.search(line):
                    probe.note("said", line)
            return write(text)

        sys.stdout.write = writing  # type: ignore[method-assign]


def main() -> None:
    """Run the script or module of the command line, as Python would."""
    rank = int(os.environ.get("RANK", "0"))
    probe = Probe(Path(os.environ[NOTES]), os.environ.get(PIPE), rank)
    probe.tell("start")
    random.seed(rank)  # unseeded, these differ in every process
    np.random.seed(rank)
    torch.manual_seed(rank)
    watch(probe, os.environ.get(SAID))
    rest = sys.argv[1:]
    while rest[0] == "--first":
        importlib.import_module(rest[1]).watch(probe)
        rest = rest[2:]
    try:
        if rest[0] == "-m":
            sys.argv = rest[1:]
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = rest
            sys.path[0] = str(Path(rest[0]).resolve().parent)  # as Python does for a script
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    probe.end()


if __name__ == "__main__":
    main()
