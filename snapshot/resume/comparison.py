"""Checks, after a restore, that the first step begins with what was restored.

Between entering and that step a script may change restored state without anybody noticing: a schedule that is stepped
at the top of the loop is stepped once more, making an iterator draws from a generator, weights are initialised anew.
Training would then go on from another state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.smp_daemon.shared.settings import DRIFT
from holdfast.snapshot.copy.engines import CopyEngine, SlotTensor
from holdfast.snapshot.copy.tensors import flat
from holdfast.snapshot.copy.witness import WatchedPieces, Witness
from holdfast.snapshot.state.adapter import GRADIENTS, Adapter
from holdfast.snapshot.state.digests import digest_of
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.record import LATE, capture_tree
from holdfast.snapshot.step.capture import read_state
from holdfast.snapshot.step.turns import BEGIN

ENV = DRIFT.variable

DRAWN_AGAIN = (
    f"(iter(DataLoader) draws from a generator; a schedule or counter at the top of the loop moves on): {BEGIN}"
)
"""What may have changed the state before the first step, and what to do about it, in a plain loop."""

DONE_AGAIN = (
    "(what is done at the top of a pass is done again after a restart in the middle of it): do that before entering, "
    "or where a pass begins only, as by `data = snap.data(loader)` and `if not data.position: ...`"
)
"""The same in a loop that says where its steps begin."""

log = get_log(__name__)


class Resumed:
    """The state right after a restore. Made at the end of a restore, and checked once, in the training thread.

    If the loop does not say where its steps begin, the generators were restored as ``optim.step()`` left them, since
    reading data will draw from them again; as the first forward begins they must be as they were originally.
    """

    def __init__(self, adapter: Adapter, engine: CopyEngine, began: Tree | None, step: int) -> None:
        """
        Args:
            began: what `read_state` returned when the snapshot was taken, as that step began; None: the loop says
                where its steps begin, and the generators are put back there.
        """
        self._adapter = adapter
        self._began = began
        self._step = step
        items = list(adapter.tensors())
        self._pieces = tuple(SlotTensor(item.tensor.detach(), 0, item.tensor.nbytes, item.name) for item in items)
        self._witness = Witness(engine, WatchedPieces(self._pieces), step)
        self._late = late_values(adapter)

    def check(self, *, declared: bool) -> None:
        """Called when the first step begins.

        Args:
            declared: whether the loop says where its steps begin; then generators and data are not compared.

        Raises:
            StateMismatch: something is not what was restored; the message names it.
        """
        now = late_values(self._adapter)
        changed = sorted(name for name in now.keys() | self._late.keys() if now.get(name) != self._late.get(name))
        drifted = [] if declared else self._drifted()
        tensors = {*self._witness.rewritten(), *self._replaced()}
        changed = drifted + sorted(tensors) + changed
        if written := sorted(set(self._witness.written()) - tensors):
            log.warning(
                "%s: written to between entering and the first step. A sample of their bytes is as restored of step "
                "%d, but if other bytes differ, so will the results: write to them before entering",
                some(written, between=", "),
                self._step,
            )
        if not changed:
            return
        why = DONE_AGAIN if declared else DRAWN_AGAIN
        refuse(
            f"{some(changed, between=', ')}: no longer what was restored of step {self._step}, as something changed it "
            f"before the first step began {why}"
        )

    def _drifted(self) -> list[str]:
        """The generators, data iterators and the like that differ from when that step began originally."""
        if self._began is None:
            return []
        now = read_state(self._adapter.early())
        # What `_began` does not name was not there then: the job's code has changed, or the release.
        return [_called(name) for name in sorted(now) if now[name] != self._began.get(name, now[name])]

    def _replaced(self) -> list[str]:
        """The names of tensors that have come or gone, or have other memory with other bytes in it. `_pieces` keeps
        their old memory, and so its contents."""
        now = {item.name: item.tensor.detach() for item in self._adapter.tensors()}
        gone = [piece.name for piece in self._pieces if not _is_same(piece.tensor, now.pop(piece.name, None))]
        return [*gone, *now]


def _is_same(before: torch.Tensor, now: torch.Tensor | None) -> bool:
    if now is None or (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    if now.data_ptr() == before.data_ptr() and now.stride() == before.stride():
        return True  # the witness compares a sample of its bytes
    mine, other = (flat(t.resolve_conj().resolve_neg().contiguous()).view(torch.uint8) for t in (before, now))
    return torch.equal(mine, other)


def refuse(text: str) -> None:
    """Raise `StateMismatch`, or warn if ``HOLDFAST_DRIFT`` accepts it."""
    if DRIFT.value() != "accept":
        raise StateMismatch(f"{text}. The snapshot is kept. {ENV}=accept continues anyway, with other results")
    log.warning("%s", text)


def _called(name: str) -> str:
    kind, _, rest = name.partition(" ")
    return f"the random generator of {rest}" if kind in ("rng", "tracker", "generators") else f"{kind} {rest!r}"


def late_values(adapter: Adapter) -> dict[str, Any]:
    """The plain values that code between two steps changes, by path; digests of the tensors among them."""
    values = capture_tree(adapter.look().late(), LATE)
    found = dict(_leaves("", {kind: part for kind, part in values.encoded.items() if kind != GRADIENTS}))
    return found | {name: digest_of(tensor) for name, tensor in values.tensors.items()}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and "$" not in value:
        for key, part in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, part)
    elif isinstance(value, list) and value:
        for i, part in enumerate(value):
            yield from _leaves(f"{path}.{i}", part)
    else:
        yield path, repr(value)
