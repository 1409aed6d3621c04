"""Megatron-Bridge: ``pretrain(config, forward_step, callbacks=[BridgeCallback()])``; no code of it is edited.

An iteration is ``on_train_step_start``, ``train_step``, counters, evaluation, checkpoints. A step begins with the first
of these, so the state includes what the iteration before has changed, also in its evaluation.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from holdfast.hook import InMemorySnapshot
from holdfast.integrations.adapters.releases import warn_of_untried
from holdfast.integrations.megatron_data import BUILD, Reruns, is_under_way, make_first_iterator_quiet
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.first_turns import Checks

NAME = "megatron_bridge"
"""The name under which this state is tracked."""

TRIED = ("0.6",)
"""Releases with which training was killed, restored and compared."""

COUNTERS = (
    "step",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "floating_point_operations_so_far",
)
"""Captured fields of `GlobalState.train_state`. The others, which phases there are, follow from the configuration."""

LOADERS = "megatron.bridge.data.loaders"
"""The module whose `BUILD` runs after the callback has restored the counters."""

log = get_log(__name__)


class BridgeCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Restores in ``on_data_init_start``, begins a step in ``on_train_step_start``, ends the job in ``on_train_end``.

    Training that was killed and started again ends as if nothing had happened. Restored are: what
    `holdfast.InMemorySnapshot` restores of megatron-core; the counters of ``train_state``; the rerun state machine;
    and, as the first step begins, all random generators, whatever building the data has drawn. Data resumes by the
    counters. The snapshot overwrites a checkpoint that was loaded before, which is never newer. An evaluation that was
    interrupted is repeated, together with the iteration before it; the evaluation after training is not covered.

    If training ends with an exit code, by ``exit_interval`` or a signal, the snapshots stay for the next start.

    Args:
        options: for `holdfast.InMemorySnapshot`.

    Raises:
        ConfigError: from ``pretrain``: the configuration is one that cannot be restored, see `check`.
        HoldfastError: from ``pretrain``: whatever `InMemorySnapshot` raises on entering, and at the first step.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._snap: _BridgeSnapshot | None = None

    @property
    def snapshot(self) -> InMemorySnapshot | None:
        """The snapshot, while training runs."""
        return self._snap

    def on_data_init_start(self, context: CallbackContext) -> None:
        if context.optimizer is None:
            return  # nothing is trained
        warn_of_untried("megatron-bridge", version("megatron-bridge"), TRIED)
        check(context.state.cfg)
        snap = _BridgeSnapshot(context.model, context.optimizer, scheduler=context.scheduler, **self._options)
        snap.follow(context.state.train_state)
        snap.__enter__()
        self._snap = snap
        if snap.restored.snapshot is not None:
            train_state = context.state.train_state
            update_num_microbatches(train_state.consumed_train_samples, consistency_check=False)
            log.info("Megatron-Bridge continues after step %d, from memory", train_state.step)
            _make_quiet_what_went_on(sys.modules[LOADERS])

    def on_train_step_start(self, context: CallbackContext) -> None:
        if self._snap is not None:
            self._snap.begin()

    def on_train_end(self, context: CallbackContext) -> None:
        snap, self._snap = self._snap, None
        if snap is not None:
            snap.close()


class _BridgeSnapshot(InMemorySnapshot):
    checks = Checks(reading=False)  # iterators resume by counters, so random numbers drawn to make them do not matter

    def follow(self, train_state: Any) -> None:
        """Track this state. Call it before entering."""
        self._train_state = train_state
        self._reruns = Reruns(get_rerun_state_machine())
        self.track(NAME, self._get, self._set)

    def _get(self) -> dict[str, Any]:
        counters = {name: getattr(self._train_state, name) for name in COUNTERS}
        return {"counters": counters, "reruns": self._reruns.get()}

    def _set(self, held: dict[str, Any]) -> None:
        same = self._train_state.step == held["counters"]["step"]
        self._reruns.set(held["reruns"], same_iteration=same)
        for name, value in held["counters"].items():
            setattr(self._train_state, name, value)


def check(config: Any) -> None:
    """Raises `ConfigError` if there is state that would not be restored."""
    if config.dataset.dataloader_type == "external":
        raise ConfigError(
            "dataloader_type=external: the place in such data is not captured; use single, cyclic or batch"
        )
    if getattr(config, "inprocess_restart", None) and config.inprocess_restart.enabled:
        raise ConfigError(
            "inprocess_restart: it and holdfast would both restart the job; disable one, see docs/restarts.md"
        )
    if BUILD not in vars(sys.modules.get(LOADERS, object)):
        raise ConfigError(
            f"{LOADERS} has no {BUILD}: this version of Megatron-Bridge is not known; see docs/support.md"
        )


def _make_quiet_what_went_on(loaders: Any) -> None:
    """Have the next call of `BUILD`, and no other, return loaders that can resume in the middle of a pass.

    The run before had made their iterators when it took its snapshot. Here, iterators of shuffled data are made when
    the first batch is read, after the generators were restored, so making them must not advance the generators.
    """
    build = getattr(loaders, BUILD)

    def building(*args: Any, **kwargs: Any) -> Any:
        setattr(loaders, BUILD, build)
        made = build(*args, **kwargs)
        for loader in made:
            if is_under_way(loader):
                make_first_iterator_quiet(loader)
        return made

    setattr(loaders, BUILD, building)
