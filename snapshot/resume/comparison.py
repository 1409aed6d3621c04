"""After a restore: whether the first step begins with what was restored.

Between entering and that step a script may change what was restored, without anybody noticing: a schedule that is
stepped at the top of the loop is stepped once more, an iterator that is made draws from a generator, weights are
initialised anew. Whoever trains on then trains something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.engines import CopyEngine, SlotTensor
from holdfast.snapshot.copy.tensors import flat
from holdfast.snapshot.copy.witness import Subjects, Witness
from holdfast.snapshot.state import rng, streams
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.flags import GRADIENTS
from holdfast.snapshot.state.inputs import Inputs
from holdfast.snapshot.state.live import Change, Tree
from holdfast.snapshot.state.record import capture_late
from holdfast.snapshot.step.boundary import BEGIN
from holdfast.snapshot.step.capture import GENERATORS, READ, read_state

ENV = "HOLDFAST_DRIFT"
SHOWN = 6

log = get_log(__name__)


class Resumed:
    """What was restored. Made at the end of a restore, and asked once, in the training thread.

    Of a loop that does not say where its steps begin, the generators were restored as ``optim.step()`` left them, since
    what reads data draws once more. What code after ``optim.step()`` drew is not drawn again: if nothing has been
    drawn by the time forward begins, they are put to where they were as it began then.

    Attributes:
        has_put: generators were put there.
    """

    def __init__(self, adapter: Adapter, engine: CopyEngine, began: Tree | None, step: int) -> None:
        """
        Args:
            began: what `began_with` gave as that step began when the snapshot was taken; None: the loop says where
                its steps begin, and the generators are put back there.
        """
        self._adapter = adapter
        self._began = began
        self._entered = streams.digests(rng.capture())
        self._step = step
        self.has_put = False
        items = list(adapter.tensors())
        self._buffers = {item.name for item in items if item.change is Change.ANY}
        self._pieces = tuple(SlotTensor(item.tensor.detach(), 0, item.tensor.nbytes, item.name) for item in items)
        self._witness = Witness(engine, Subjects(self._pieces), step)
        self._late = _flat(adapter)  # after the walk, which finds what of an optimizer's state is no tensor

    def check(self, *, declared: bool, forward_ran: bool = False) -> None:
        """The first step begins.

        Args:
            forward_ran: without anybody seeing it; it may have changed buffers.

        Raises:
            StateMismatch: something is not what was restored; the message names it.
        """
        now = _flat(self._adapter)
        changed = sorted(name for name in now.keys() | self._late.keys() if now.get(name) != self._late.get(name))
        drifted = [] if declared else self._drifted(forward_ran)
        exempt = self._buffers if forward_ran else set()
        tensors = {*self._witness.rewritten(), *self._replaced()} - exempt
        changed = drifted + sorted(tensors) + changed
        if written := sorted(set(self._witness.written()) - tensors - exempt):
            log.warning(
                "%s: written to between entering and the first step. As far as a sample of their bytes tells, they are "
                "what was restored of step %d; if they are not, results will be others: write to them before entering",
                _some(written),
                self._step,
            )
        if not changed:
            return
        text = (
            f"{_some(changed)}: no longer what was restored of step {self._step}, as something "
            "changed it before the first step began (iter(DataLoader) draws from a generator; a schedule or counter "
            f"at the top of the loop moves on): {BEGIN}"
        )
        _refuse(text)

    def _drifted(self, forward_ran: bool) -> list[str]:
        """What of the generators, data iterators and the like is not as that step began then. Generators that nothing
        has drawn from since entering are put to where they were as forward began."""
        if self._began is None:
            return []
        read, generators = self._began[READ], {} if forward_ran else self._began[GENERATORS] or {}
        now = read_state(self._adapter.early())
        drifted = {name for name in now if now[name] != read.get(name)}
        behind = {
            name: state
            for name, state in generators.items()
            if f"rng {name}" in drifted and now[f"rng {name}"] == self._entered.get(name)
        }
        if behind:
            rng.restore(rng.capture() | behind)
            self.has_put = True
            there = streams.digests(rng.capture())
            drifted -= {f"rng {name}" for name in behind if there[name] == read.get(f"rng {name}")}
        return [_called(name) for name in sorted(drifted)]

    def _replaced(self) -> list[str]:
        """The names of tensors that have come or gone, or have other memory with other bytes in it. What they had is
        still as it was, as it is held here."""
        now = {item.name: item.tensor.detach() for item in self._adapter.tensors()}
        gone = [piece.name for piece in self._pieces if not _is_same(piece.tensor, now.pop(piece.name, None))]
        return [*gone, *now]


def _is_same(before: torch.Tensor, now: torch.Tensor | None) -> bool:
    if now is None or (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    if now.data_ptr() == before.data_ptr() and now.stride() == before.stride():
        return True  # a sample of its bytes is compared
    mine, other = (flat(t.resolve_conj().resolve_neg().contiguous()).view(torch.uint8) for t in (before, now))
    return torch.equal(mine, other)


def check_inputs(expected: str, given: Inputs | None, step: int) -> None:
    """The first optimizer is about to step, after a forward on what was `given`.

    Raises:
        StateMismatch: when the snapshot was taken that was restored, it was given something else.
    """
    if given is None or given.digest() != expected:
        _refuse(
            f"the first step after the restore of step {step} was given another batch than when the snapshot was "
            "taken: it was read ahead, before the hook was entered, or from another place in the data. Go through data "
            "by `snap.data`, and make what reads ahead a part of its source; or read the first batch after entering"
        )


def warn_of_unknown_inputs(step: int) -> None:
    """The first forward after a restore runs, and the snapshot does not say what it was given."""
    log.warning(
        "the snapshot of step %d was sealed before it was known what the first forward of that step is given, as by "
        "`drain`, or at the end of a loop, or as it came late: nobody can tell whether it is another batch now. If "
        "batches are read ahead, go through data by `snap.data`",
        step,
    )


def refuse_unseen(step: int) -> None:
    """Raises `StateMismatch`: generators were put to where forward began, and an optimizer has stepped without any
    forward being seen."""
    _refuse(
        "no forward of the model was seen in the first step after the restore of step "
        f"{step}, so that nobody can tell whether it was given the right batch and random numbers: {BEGIN}"
    )


def _refuse(text: str) -> None:
    if os.environ.get(ENV) != "accept":
        raise StateMismatch(f"{text}. The snapshot is kept. {ENV}=accept goes on all the same, with other results")
    log.warning("%s", text)


def check_environment() -> None:
    """Raises `ConfigError` unless ``HOLDFAST_DRIFT`` is empty or ``accept``."""
    if os.environ.get(ENV, "") not in ("", "accept"):
        raise ConfigError(f"{ENV}={os.environ[ENV]!r}: say accept to go on with what is no longer what was restored")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _called(name: str) -> str:
    kind, _, rest = name.partition(" ")
    return f"the random generator of {rest}" if kind in ("rng", "tracker") else f"{kind} {rest!r}"


def _flat(adapter: Adapter) -> dict[str, Any]:
    """The plain values that code between two steps changes, by path; digests of the tensors among them."""
    values = capture_late(adapter)
    found = dict(_leaves("", {kind: part for kind, part in values.encoded.items() if kind != GRADIENTS}))
    return found | {name: streams.digest(tensor) for name, tensor in values.tensors.items()}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and "$" not in value:
        for key, part in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, part)
    elif isinstance(value, list) and value:
        for i, part in enumerate(value):
            yield from _leaves(f"{path}.{i}", part)
    else:
        yield path, repr(value)
