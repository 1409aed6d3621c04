"""The hook in the training process, as users see it. For what happens while it is entered see `snapshot.session`.

Call it from the training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any, Literal, Self

import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.first_turns import Checks
from holdfast.snapshot.options import Options
from holdfast.snapshot.progress import Statistics
from holdfast.snapshot.resume.blocks import Blocks, warn_of_order
from holdfast.snapshot.resume.restore import Restored
from holdfast.snapshot.session import Session, enter
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.hidden import registered, untracked
from holdfast.snapshot.state.live import At
from holdfast.snapshot.state.tracked import make
from holdfast.snapshot.step.data import Data
from holdfast.snapshot.step.position import DATA


class SnapshotHook:
    """Protects one rank's state; see `holdfast.InMemorySnapshot` for the options.

    Attributes:
        checks: which checks of the loop are made.
        tracked: names that were given to `track`.
        system: the threads, clock, files and sockets to use.
        blocks: which block of the script is entered next; shared by all hooks of this process.
    """

    checks = Checks()
    system: System = MACHINE
    blocks = Blocks()

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self._adapter = adapter
        self._options = options
        self._entered: Session | None = None  # kept after leaving, for `step` and others
        self._statistics = Statistics()
        self.tracked: set[str] = set()

    @property
    def _session(self) -> Session:
        if self._entered is None:
            raise ConfigError("the hook was not entered: do this inside `with InMemorySnapshot(...) as snap:`")
        return self._entered

    @property
    def step(self) -> int:
        """How many steps, or turns of a loop with `begin` or `steps`, the state has behind it: where the loop goes on.
        0 on a cold start.

        Raises:
            ConfigError: before entering. So do all other members except `protected_step`, `sealed_step`, `track`,
                `untracked` and `statistics`.
        """
        session = self._session
        session.first.asked = session.first.asked_for_step = True
        return session.position.number(session.progress.step)

    @property
    def epoch(self) -> int:
        """How many passes over `data` are finished: the pass in which the loop goes on. 0 on a cold start. Of several
        sources with names of their own, that counts which the loop names first."""
        self._session.first.asked = True
        return self._session.position.epoch

    def begin(self) -> None:
        """Say that the next step begins: call it at the top of the loop. Returns at once.

        From the first call on, a step lasts from one call to the next if an optimizer stepped in between, and `step`
        counts the calls. The first call after a restore puts the random generators back.

        Raises:
            StateMismatch: the first step does not begin with the state that was restored.
        """
        self._session.loop.begin_turn()

    def steps(self, count: int) -> Iterator[int]:
        """The loop's own step numbers, from where it goes on up to `count`; each turn begins a step, as `begin` does.

        ::

            for step in snap.steps(1000):
                loss = train_step(...)
        """
        return self._session.loop.steps(count)

    def data(self, source: Any, *, name: str = DATA, ahead: int | None = None, exact: bool = True) -> Data:
        """Wrap a `DataLoader`, or another source of batches, so that it goes on where it was; each batch begins a step,
        as `begin` does. Each loop over it is one pass; `epoch` says how many are finished.

        ::

            for epoch in range(snap.epoch, epochs):
                for x, y in snap.data(loader):
                    ...

        ``for i, (x, y) in snap.data(loader).enumerate():`` numbers the batches of a pass.

        Args:
            source, ahead, exact: see `snapshot.step.data.Data`.
            name: tells sources apart, if there are several.

        Raises:
            ConfigError: the source cannot be read again, or its saved place is that of another number of ranks.
        """
        return self._session.loop.data(source, name, ahead, exact)

    def finish(self) -> None:
        """Say that training is over although its loop, over `steps` or `data`, is left before its end. The job then
        ends with the block, as if the loop had reached its end. Returns at once.

        Call it on every rank. Without it such a block keeps its snapshots for the next start.
        """
        self._session.finish()

    @property
    def restored(self) -> Restored:
        """How this rank started: see `snapshot.resume.attempt.Restored`."""
        return self._session.restored

    @property
    def statistics(self) -> Statistics:
        """Counters, and how often snapshots are taken and why: see `snapshot.progress.Statistics`."""
        return self._statistics

    @property
    def protected_step(self) -> int | None:
        """The newest step whose snapshot is protected on every node, as far as the ranks have agreed. None if there is
        none, and before entering."""
        protected = self._entered.protecting.ledger.protected if self._entered is not None else None
        return protected.step if protected else None

    @property
    def sealed_step(self) -> int | None:
        """The newest step whose snapshot is sealed on every node, as far as the ranks have agreed: where a restart goes
        back to if only processes crashed. None if there is none, and before entering."""
        ledger = self._entered.protecting.ledger if self._entered is not None else None
        newest = ledger and (ledger.sealed or ledger.protected)
        return newest.step if newest else None

    def track(
        self,
        name: str,
        get: Callable[[], Any] | None = None,
        set: Callable[[Any], Any] | None = None,
        *,
        tensors: torch.nn.Module | dict[str, torch.Tensor] | None = None,
        changes: Literal["any", "after step", "step", "never"] = "any",
        when: Literal["forward", "step"] = "forward",
    ) -> None:
        """Keep state that is in no ``state_dict``: attributes, buffers of a compressor, an EMA copy. Call it before
        entering.

        Args:
            name: the same in every run of the job.
            get, set: ``get()`` returns plain values (numbers, texts, bytes, arrays, small tensors, and lists, tuples,
                sets, deques and dicts of them), and ``set(values)`` puts them back when the job is restored.
            tensors: a module, or a dict of tensors by name; copied and restored in place, of any size.
            changes: when `tensors` change. ``"any"``: at any time; they are copied as the next forward begins.
                ``"after step"``: only in ``optim.step()`` and in code between it and the next forward, as an EMA does;
                they are copied while the next step runs, as with ``"step"`` (only in ``optim.step()``) and
                ``"never"``.
            when: when to call `get`: as the next forward begins, or (``"step"``) when ``optim.step()`` returns, for
                values that change before that forward: by reading data, or at the top of a step.

        Raises:
            ConfigError: the arguments do not fit together, the name is taken, or the hook was entered before.
        """
        if self._entered is not None:
            raise ConfigError(f"track({name!r}): the state is restored on entering: call it before that")
        self._adapter.track(make(name, get, set, tensors, changes, when))
        self.tracked.add(name)

    def rebuild(self, make: Callable[[At], object]) -> None:
        """Say how a restart makes what the job has added to the model or the optimizer in training: new layers, new
        parameters. Call it before entering.

        ::

            snap.rebuild(lambda at: add_layer() if at.step > 1000 else None)

        Args:
            make: called with the place where the job goes on, ``step`` and ``epoch``, before the state is loaded; on
                each rank, and once more if an older snapshot has to be restored instead. Not called on a cold start.

        Raises:
            ConfigError: the hook was entered before.
        """
        if self._entered is not None:
            raise ConfigError("rebuild: the state is restored on entering: call it before that")
        self._adapter.rebuilds.append(make)

    @property
    def untracked(self) -> list[str]:
        """Names of tensors, arrays and generators in attributes of modules and optimizers that are not captured.

        Most are not state, such as tables of positions; `track` those that are. `holdfast audit` tells which matter.
        """
        tensors = (item.tensor for item in self._adapter.tensors())
        return untracked(self._roots(), set(map(memory_of, chain(tensors, self._adapter.generators().values()))))

    def _roots(self) -> list[tuple[str, Any]]:
        modules = [(f"model{i}", module) for i, module in enumerate(self._adapter.modules())]
        return [*modules, *((f"optim{i}", optimizer) for i, optimizer in enumerate(self._adapter.optimizers()))]

    @contextmanager
    def phase(self, kind: Literal["comm"]) -> Iterator[None]:
        """Say that the step communicates while the block runs: holdfast's traffic waits, for at most a second. So do
        copies of state on the host; those from a GPU do not. Optional; never blocks.
        """
        if kind != "comm":
            raise ConfigError(f"phase({kind!r}): the only kind is 'comm'")
        session = self._session
        session.communicate(True)
        try:
            yield
        finally:
            session.communicate(False)

    def drain(self, deadline_s: float) -> bool:
        """Block until this node has sealed every snapshot taken so far, and protected those that are to be protected;
        for at most `deadline_s`, or some seconds longer if its SMP does not respond.

        For planned stops, after `begin`, or in a plain loop after the backward of a step. A snapshot that is sealed
        before its step's first forward does not record what that was given, so a restart cannot compare it.

        Returns:
            True if all are sealed and protected, as far as this node can tell. False if some failed, are not done
            yet, or the SMP is gone; if a step has ended whose snapshot is only taken as the next one begins; or if
            gradients of a plain loop's step are still to be computed.
        """
        return self._session.drain(deadline_s)

    def __enter__(self) -> Self:
        """Restore if the job has a snapshot, and begin to take snapshots. A collective call.

        Raises:
            HoldfastError: set-up errors always raise, whatever `strict` says.
        """
        for piece in registered(self._roots()):
            self._adapter.track(piece)
        options, arena = self._options, self._options.job_arena
        self._block = options.block or self.blocks.number(arena)
        # The trainings after the first one begin from nothing by design.
        require = options.require if self.blocks.is_start(arena) else 0
        numbered = replace(options, block=self._block, require=require)
        self._entered = enter(self._adapter, numbered, self._statistics, self.checks, self.system)
        if options.block is None and self._entered.rank.agreement.rank == 0:
            warn_of_order(self._block)
        self._entered.first.look(self._entered.rank.engine)
        return self

    def close(self, *, early: bool = False) -> None:
        """Leave the hook without a ``with`` block, when training has ended well.

        Args:
            early: training has stopped before its end, and goes on at the next start: the snapshots taken so far stay.
        """
        self.leave(None, early=early)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """If the block ended well, finish the job: SMPs exit and their memory is freed (unless ``keep``). A collective
        call then; blocks.

        After an exception everything stays, for the restart. So it does if a loop over `steps` or `data` was left
        before its end on any rank, unless all have said `finish`: the state after the last step is protected first, and
        one line says so. A loop that goes through neither cannot be seen, and ends the job. In a process that was
        forked inside the block nothing happens: the job belongs to its parent.
        """
        self.leave(error)

    def leave(self, error: BaseException | None, *, early: bool = False) -> None:
        """For trainers that learn of errors by themselves: leave the hook as `__exit__` does after `error`, or, without
        one, as `close` does."""
        self._session.leave(error, early=early)
        if error is None and not self._options.keep:
            self.blocks.over(self._options.job_arena, self._block)

    # ------------------------------------------------------------------ for trainers that report every step themselves

    def before_step(self) -> None:
        """``optim.step()`` is about to be called; see `Loop.before_step`."""
        self._session.loop.before_step()

    def after_step(self) -> None:
        """``optim.step()`` has returned; see `Loop.after_step`."""
        self._session.loop.after_step()
