"""`InMemorySnapshot`: the one thing that users import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

from holdfast.integrations.adapters import adapter_for
from holdfast.snapshot.first_turns import Checks
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.options import Options, OptionsGiven
from holdfast.snapshot.state.live import Stateful


class InMemorySnapshot(SnapshotHook):
    """Keeps this rank's training state in the memory of its node and of other nodes while the block runs.

    Entering restores the newest snapshot in place if the job has one. Every ``optim.step()`` inside the block is a
    step; its state is copied while the next step runs. All ranks enter together, after the process group, the model
    and the optimizer are made, and before data is read. Leaving without an exception ends the job and frees its memory,
    unless a loop over `steps` or `data` was left before its end.

    Say where a step begins with `steps`, `data` or `begin`; a plain loop need not. docs/loops.md says which loops are
    plain, and which state belongs to a snapshot.

    Args:
        model: a module, or a list of modules (Megatron's chunks).
        optim: a `torch.optim.Optimizer`, a list of them, or an optimizer of megatron-core; optimizers that it wraps, as
            SAM and torchtitan's container do, are captured too. None: the loop changes parameters by itself, and waits
            while all of them are copied as a step begins, into as much memory again.
        scheduler: a learning rate scheduler, or a list of them.
        extra: more objects with ``state_dict`` and ``load_state_dict``, by name, such as a data loader. Entries that
            are None are left out. Ranks may pass different objects.
        job: id of the training run, the same on every rank and every restart. Default ``HOLDFAST_JOB``, torchrun's run
            id or Slurm's job id.
        every: number of steps from one snapshot to the next. ``"auto"``: the interval that loses least time, measured
            on the job, and never more than `overhead_budget`; `statistics` has it, and the reason. A young job takes
            many: the first after its first step. The same on every rank. Default ``HOLDFAST_EVERY``, or ``"auto"``.
        protect_every: protect one of this many snapshots. The others are only sealed: they survive a crash of
            processes, but not the loss of a node. ``"auto"``: protect the next snapshot whenever no other is being
            encoded. The same on every rank.
        protect: ``"k+m"``, such as ``"4+2"``: each group of k + m or more nodes may lose any m of them, for m/k more
            memory; ``"copies:r"``: r other nodes hold a whole copy of each node's bytes; ``"auto"``: one parity unit a
            stripe, groups of at most 8 nodes; ``"none"``: no redundancy.
        domains: failure domains of this node, such as ``"rack=r7,switch=s3,@dp"``. No group has more than m nodes of
            one domain, if that is possible. ``@dp`` is the rank's own data-parallel place. Default
            ``HOLDFAST_DOMAINS``.
        slots: slot files per shard, 2 to 16, at the cost and for the reasons in docs/protection.md.
        start: start an SMP if none runs on this node.
        keep: leave the SMPs and their snapshots in place when the block ends well.
        strict: raise if snapshots can no longer be taken; the default is to log it and train on.
        arena: directory for arenas. Default ``HOLDFAST_ARENA``, or ``/dev/shm/holdfast-<uid>``.
        deadline_s: how long the fence waits for a copy before it gives up that snapshot.
        overhead_budget: fraction of training time that snapshots may take, unless `every` is a number; 0: any. Default
            ``HOLDFAST_OVERHEAD_BUDGET``, or 0.01.
        max_repeats: number of starts in a row that may end at the same step in the same way; the next one is refused
            with `Repeated`. 0: any number. Default ``HOLDFAST_MAX_REPEATS``, or 5.
        generations: number of protected snapshots to keep, besides those in progress. Each one beyond the first takes
            one more slot. Default ``HOLDFAST_GENERATIONS``, or 1.
        restore_step: restore the snapshot of this step instead of the newest. Newer ones are kept until a snapshot
            taken since is protected; from then on, a restart with the same value resumes from what was taken since.
            Default ``HOLDFAST_RESTORE_STEP``.
        require: ``"snapshot"``: refuse to begin from nothing; a number: refuse to go back to before that step, with an
            `Unrecoverable` that says what was found. Of a script with several trainings it concerns the first that is
            entered. Default ``HOLDFAST_REQUIRE``, or nothing is required.
        elastic: also restore a snapshot of a different number of data-parallel ranks; its shards are cut anew, in
            memory. The same on every rank. Default ``HOLDFAST_ELASTIC``, or off. See docs/elastic.md.
        block: which training of the script this is, from 1, if it has several under one job and a start need not enter
            them in order. Default: counted. See docs/loops.md.

    Raises:
        ConfigError: an argument or the machine's set-up is wrong. Entering raises any `HoldfastError`, as does the
            first step, when memory is reserved; after that, see `strict`.
    """

    def __init__(
        self,
        model: Any,
        optim: Any = None,
        *,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        extra: Mapping[str, Stateful | None] | None = None,
        **options: Unpack[OptionsGiven],
    ) -> None:
        adapter = adapter_for(model, optim, scheduler, {} if extra is None else dict(extra))
        super().__init__(adapter, Options.given(**options))


class SettledSnapshot(InMemorySnapshot):
    """For trainers that say when a step begins, by calling `settle`."""

    # These frameworks restore their own objects after the hook was entered.
    checks = Checks(
        resumption=False,
        another_batch=(
            "the trainer's data depends on something that is not restored, or its class keeps batches from step to "
            "step: `track` that (an argument of the integration), or derive what is random in a batch from its samples"
        ),
        reading=False,
        restored_by_themselves=frozenset({"transformers", "accelerate", "lightning", "lightning_fabric"}),
    )

    def __enter__(self) -> Self:
        super().__enter__()
        self._session.position.declare(self._session.progress.step)  # they may evaluate before the first step
        return self

    def settle(self) -> None:
        """Tell the hook that the last step is complete and the next one begins. May be called several times a step."""
        self._session.loop.mark()
        self._session.loop.begin()

    def heartbeat(self) -> None:
        """Tell the SMP that this process is alive, while something else than a step takes long. Returns at once."""
        self._session.rank.heartbeat()
