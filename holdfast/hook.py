"""`InMemorySnapshot`: the one thing that users import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from holdfast.integrations.adapters import adapter_for
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.options import Options
from holdfast.snapshot.session import Checks
from holdfast.snapshot.state.live import Stateful


class InMemorySnapshot(SnapshotHook):
    """Keeps this rank's training state in the memory of its node, and of the other nodes, while the block runs.

    Entering restores the newest snapshot in place if the job has one. Every ``optim.step()`` inside the block is a
    step; its state is copied while the next step runs. All ranks enter together, after the process group, the model
    and the optimizer are made, and before data is read. Leaving without an exception ends the job: memory is freed.

    The state at a boundary is the state with which the next training step begins. What code between two steps leaves
    behind (clamped weights, averages, schedules, counters) belongs to it; what it borrows and gives back (weights
    swapped for an evaluation) does not. Say where a step begins with `steps`, `data` or `begin`; else the first forward
    in training mode and with gradients after ``optim.step()`` begins it.

    Args:
        model: a module, or a list of modules (Megatron's chunks).
        optim: a `torch.optim.Optimizer`, a list of them, or an optimizer of megatron-core. The state of those that it
            wraps, as SAM and torchtitan's container do, is captured with its own. A step ends with the step of the last
            one, also where a `torch.amp.GradScaler` among `extra` skips it.
        scheduler: a learning rate schedule, or a list of them.
        extra: more objects with ``state_dict`` and ``load_state_dict``, by name; for example a data loader. One that is
            None is left out; other ranks may give others.
        job: id of the training run, the same on every rank and restart; default from the environment:
            ``HOLDFAST_JOB``, torchrun's run id, Slurm's job id.
        every: take a snapshot every so many steps. ``"auto"``: as often as is best, within `overhead_budget`; it is
            measured while the job runs, and planned anew when steps, costs or failures change. `statistics` say how
            often, and why. The same on every rank.
        protect_every: protect one of every so many snapshots; the others are only sealed, and not sent to other nodes:
            they survive a crash of processes, and not the loss of a node. ``"auto"``: protect the next one whenever no
            other is being encoded. The same on every rank.
        protect: ``"k+m"``, such as ``"4+2"``: any m nodes of each group of k + m or more may be lost, for m/k more
            memory; ``"copies:r"``: each node's bytes whole on r others; ``"auto"``: one parity, groups of at most 8
            nodes; ``"none"``.
        domains: what this node fails together with, such as ``"rack=r7,switch=s3,@dp"``; no group has more than m
            nodes of one of them, if that can be. ``@dp`` is the rank's own data-parallel place. Default
            ``HOLDFAST_DOMAINS``.
        slots: slot files per shard, 2 to 16. Memory per node is about ``slots * S * (1 + m/k)`` for S bytes of state;
            less parity with `protect_every`. With 2, steps are skipped while a snapshot is encoded, and one that is
            only sealed gives its slot to the next. See docs/protection.md.
        start: start an SMP if none runs on this node.
        keep: leave the SMPs and their snapshots in place when the block ends well.
        strict: raise if snapshots cannot be taken any more; the default is to log it and train on.
        arena: where arenas lie; default ``HOLDFAST_ARENA``, or ``/dev/shm/holdfast-<uid>``.
        deadline_s: how long the fence waits for a copy before it gives that snapshot up.
        overhead_budget: fraction of training time that snapshots may take. Where they measurably take more, the ranks
            agree on a longer interval than `every`; 0: never. Default ``HOLDFAST_OVERHEAD_BUDGET``, or 0.01.
        max_repeats: after so many starts in a row that ended at the same step in the same way the next one is refused
            with `Repeated`; 0: never. Default ``HOLDFAST_MAX_REPEATS``, or 5.
        generations: how many protected snapshots are kept, beside those that are under way: a slot more for each
            beyond the first. Default ``HOLDFAST_GENERATIONS``, or 1.
        restore_step: go back to the snapshot of that step, not to the newest. What is newer is kept until something
            taken since is protected; then the same wish goes on from there. Default ``HOLDFAST_RESTORE_STEP``.
        elastic: restore a snapshot of another number of data-parallel ranks, too: it is cut anew, in memory. The same
            on every rank. Default ``HOLDFAST_ELASTIC``, or off. See docs/elastic.md.

    Raises:
        ConfigError: an argument or the machine's set-up is wrong. Entering raises any `HoldfastError`, as does the
            first step, at which memory is reserved; after that, see `strict`.
    """

    def __init__(
        self,
        model: Any,
        optim: Any,
        *,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        extra: Mapping[str, Stateful | None] | None = None,
        job: str | None = None,
        every: int | Literal["auto"] = 1,
        protect_every: int | Literal["auto"] = 1,
        protect: str = "auto",
        domains: str | None = None,
        slots: int = 3,
        start: bool = True,
        keep: bool = False,
        strict: bool = False,
        arena: Path | None = None,
        deadline_s: float = 60.0,
        overhead_budget: float | None = None,
        max_repeats: int | None = None,
        generations: int | None = None,
        restore_step: int | None = None,
        elastic: bool | None = None,
    ) -> None:
        options = Options.given(
            job=job or None,
            every=every,
            protect_every=protect_every,
            protect=protect,
            domains=domains,
            slots=slots,
            start=start,
            keep=keep,
            strict=strict,
            arena=arena,
            deadline_s=deadline_s,
            overhead_budget=overhead_budget,
            max_repeats=max_repeats,
            generations=generations,
            restore_step=restore_step,
            elastic=elastic,
        )
        super().__init__(adapter_for(model, optim, scheduler, {} if extra is None else dict(extra)), options)


class SettledSnapshot(InMemorySnapshot):
    """For trainers that say when a step begins: `settle`."""

    # They restore what is theirs after entering.
    checks = Checks(
        resumption=False,
        reading=False,
        restored_by_themselves=frozenset({"transformers", "accelerate", "lightning", "lightning_fabric"}),
    )

    def settle(self) -> None:
        """The next step begins; all of the last one is done. It may be called more often than steps are taken."""
        self._session.mark()
        self._session.begin()
