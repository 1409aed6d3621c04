"""The blocks of a script: several trainings under one job, each in a ``with InMemorySnapshot`` of its own.

A start that enters a block goes on with the state of that block only. Another block's state may fit as well, tensor by
tensor, and would be continued silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.smp_daemon.shared.crash_loop import newest_start
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.limits import MAX_GIVEN
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.starts import ScriptBlock
from holdfast.snapshot.resume.comparison import refuse
from holdfast.snapshot.state.adapter import Adapter, entered
from holdfast.snapshot.state.live import Tree

BLOCK = "block"
"""Where a snapshot's record says which block it is of, as plain values, among those of its loop."""

log = get_log(__name__)

APART = "or give each training of the script a job= of its own"


def check_not_entered(place: Path) -> None:
    """Check that no thread is in a block of this rank, whose place in its job's arena this is: another one would
    restore what that holds, and then write in its place. Threads that are other ranks are no matter.

    Raises:
        ConfigError: it is in one; nothing was changed anywhere.
    """
    if place in (each for _, each in [*entered.values()]):
        raise ConfigError(
            "a hook of this job is entered already, and another one would restore what that one holds, and end its "
            "snapshots: if one loop trains what both are given, give it all to one hook, "
            "InMemorySnapshot([model, other], [optim, other_optim]); otherwise give the other one a job= of its own"
        )


def warn_of_order(number: int) -> None:
    """Block `number` is entered, and the script does not number its blocks."""
    if number > 1:
        log.warning(
            "this is training %d of one process and one job: if it is killed in it, the script begins with the first "
            "one again, and is refused, as it would go on with another training's state. Skip what is finished, and "
            "give this one its number: InMemorySnapshot(..., block=%d); %s",
            number,
            number,
            APART,
        )


def describe(number: int, adapter: Adapter) -> ScriptBlock:
    """The block that enters with what `adapter` was given."""
    kinds = Counter(type(_innermost(each)).__qualname__ for each in (*adapter.modules(), *adapter.optimizers()))
    given = ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in kinds.items())
    return ScriptBlock(number, given[:MAX_GIVEN])


def _innermost(part: object) -> object:
    """A module without the wrappers of DDP and of ``torch.compile``, which another world may not need."""
    while isinstance(inner := getattr(part, "module", getattr(part, "_orig_mod", None)), torch.nn.Module):
        part = inner
    return part


def check_order(inventories: Sequence[Inventory], block: ScriptBlock) -> None:
    """Check that the newest start was of the same block, if any of its state is held.

    Raises:
        ConfigError: it was of another; nothing was changed anywhere.
    """
    start = newest_start(inventories)
    if start is not None and start.block is not None and any(each.shards or each.parities for each in inventories):
        _check_number("memory holds", start.block, block)


def check_block(loop: Tree, block: ScriptBlock) -> None:
    """Check that a snapshot is of this block, by its `loop` as `Position.tree` gives it. Raises `ConfigError`."""
    if BLOCK in loop:
        _check_number("the snapshot holds", _read(loop), block)


def check_given(loop: Tree, block: ScriptBlock) -> None:
    """Check that a snapshot, whose tensors fit, was taken of the same classes. Raises `StateMismatch`, unless
    ``HOLDFAST_DRIFT`` says otherwise."""
    if BLOCK in loop and (held := _read(loop)).given != block.given:
        refuse(f"the snapshot was taken of {held.given}, and this block was given {block.given}")


def _read(loop: Tree) -> ScriptBlock:
    return from_plain(ScriptBlock, loop[BLOCK], "the block of a snapshot")


def _check_number(where: str, held: ScriptBlock, given: ScriptBlock) -> None:
    if held.number != given.number:
        raise ConfigError(
            f"{where} the state of {held}, and {given} is entered: it would go on with another training's state. "
            f"Skip what is finished, and enter the other with block={held.number}; or, if that one is over although "
            "its loop was left early, say snap.finish() in it (`holdfast gc --older-than 0s` frees what it left); "
            f"{APART}. What is held stays as it is"
        )
