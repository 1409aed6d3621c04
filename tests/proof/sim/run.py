"""One run: lives of a job with faults, then a quiet time without faults, in which the promise must hold."""

from __future__ import annotations

import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch.jit._recursive
from torch.optim import optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.smp_daemon.coding.regroup import Drained
from holdfast.smp_daemon.shared import limits
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, StateMismatch
from holdfast.snapshot.state.adapter import entered
from tests.proof.sim.faults import Faults
from tests.proof.sim.moves import Moves
from tests.proof.sim.plan import SeedPlan, draw
from tests.proof.sim.scheduler import BEGAN_S, DEFAULT_TURNS, Moment, Scheduler
from tests.proof.sim.sized import draw_sized
from tests.proof.sim.tasks import Violated, Violation
from tests.proof.sim.tripwires import wired
from tests.proof.sim.turns import Priorities, Turns, Uniform
from tests.proof.sim.world import World

LIFE_DEADLINE_S = 7200.0
"""Timeout for a life of the job, in simulated seconds, whatever happens."""

CALM_S = 45.0
"""How long it takes, without faults, until no call that a fault affected is in progress, in simulated seconds."""

REST_S = 700.0
"""Longer than any deadline: a task that still waits after this many quiet seconds waits for ever."""

TURNS_A_RANK = 8_000
"""Limit on the turns of a run of a large job, for each of its ranks."""

LONGER = 8
"""How many times as many turns a run may take whose bytes cost time, as it lasts days."""

DRAIN_S = 600.0
"""How long a node with a few bytes may take to be drained while nothing strikes, in simulated seconds."""

DRAINED_STEPS = 100
"""More steps than a job takes until it has heard of a node that leaves."""

DRAINED_STEP_S = 0.1
"""The longest time that one of them takes at least, in simulated seconds."""

LOOK_AWAITS = 20
"""Awaits between two looks whether all trainers have begun."""

DECISIONS = 2
"""How often the user chooses a run or gives one up, before the job must go on."""

COLLECT_EVERY = 1024
"""Number of runs in one process between two garbage collections. A run leaves some 0.4 MB, and collecting takes a
seventh of a run's time. The child processes of a campaign end before the first collection."""

_runs = itertools.count(1)


@dataclass(slots=True)
class SeedReport:
    """What one seed did.

    Attributes:
        violations: the first one ended the run.
        checks: how often each of `tests.proof.sim.checks` looked at something.
        states: the kinds of state that its trainers had, if they had real modules.
        history: see `Scheduler`.
    """

    seed: int
    violations: list[Violated]
    awaits: int
    turns: int
    fingerprint: int
    simulated_s: float
    faults: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    crashes: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    history: list[Moment] = field(default_factory=list)


def simulate(seed: int, trace: Callable[[str], None] | None = None, *, sized: bool = False) -> SeedReport:
    """Run one seed; see `play`. `sized`: on nodes of real size."""
    return play((draw_sized if sized else draw)(seed), trace=trace)


@contextmanager
def _left_as_it_was() -> Iterator[None]:
    """A process that is killed takes along what it has put on torch. Here all are one process: without this, the next
    seeds would go through what every trainer killed so far has left, until the stack was too small for that."""
    with ExitStack() as stack:
        for owner, name in ((_BaseDataLoaderIter, "__init__"), (torch.jit._recursive, "create_script_module")):
            stack.enter_context(patch.object(owner, name, getattr(owner, name)))
        for held in (entered, optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
            stack.enter_context(patch.dict(held))
        yield


def order_of(plan: SeedPlan) -> Turns:
    """The order in which tasks take turns, as the plan says."""
    seed = f"turns {plan.turns}"
    return Priorities(seed, plan.span) if plan.order == "priorities" else Uniform(seed, plan.chance)


@_left_as_it_was()  # also by those that end as the scheduler unwinds
def play(
    plan: SeedPlan,
    order: Turns | None = None,
    *,
    trace: Callable[[str], None] | None = None,
    telling: bool = False,
) -> SeedReport:
    """Run a plan. Call it within `sim.seams.installed`, always from the same thread.

    Args:
        order: the order of turns, instead of the plan's.
        trace: called with a line for everything that happens.
        telling: whether to record the history.
    """
    most_turns = max(DEFAULT_TURNS, TURNS_A_RANK * len(plan.ranks)) * (1 if plan.costs is None else LONGER)
    scheduler = Scheduler(f"world {plan.seed}", order or order_of(plan), most_turns)
    scheduler.trace, scheduler.telling = trace, telling
    world = World(plan, scheduler)
    if trace is not None:
        logging.disable(logging.NOTSET)
    try:
        with wired(), _as_large(plan), world.promptness.listening():
            _Driver(world).drive()
    except Violation as violation:
        if not scheduler.violations:
            scheduler.violate(*violation.violated)
    finally:
        scheduler.unwind()
        if trace is not None:
            logging.disable()
        if next(_runs) % COLLECT_EVERY == 0:
            gc.collect()
    return SeedReport(
        plan.seed,
        list(scheduler.violations),
        scheduler.awaits,
        scheduler.turns,
        scheduler.fingerprint,
        scheduler.now - BEGAN_S,
        world.faults,
        world.hits,
        world.crashes,
        world.oracle.checks,
        _states(plan),
        scheduler.history,
    )


@contextmanager
def _as_large(plan: SeedPlan) -> Iterator[None]:
    """What holdfast expects of bytes, it expects of those that the simulated ones stand for."""
    with patch.object(limits, "SLOWEST_BYTES_PER_S", limits.SLOWEST_BYTES_PER_S / plan.scale):
        yield


def _states(plan: SeedPlan) -> Counter[str]:
    state = plan.state
    if state is None:
        return Counter()
    sharing = "replicas" if state.replicated else "shards"
    return Counter((*state.kinds, state.optimizer, state.pace, state.loop, "elastic" if state.sizes else sharing))


class _Driver:
    """Does what launchers and operators do, and checks everything at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._plan = world.plan
        self._scheduler = world.scheduler
        self._faults = Faults(world)
        self._moves = Moves(world)

    def drive(self) -> None:
        """Run all lives, and the quiet time. Raises `Violation`."""
        if self._plan.refused:
            self._refuse(self._plan.refused)
        for faults, gap in zip(self._plan.lives, self._plan.gaps, strict=True):
            self._replace(gap.replace)
            if self._plan.moves and not faults:
                self._recover(self._plan.steps, "after machines moved")
                outcomes = set[str]()
            else:
                self._faults.begin_life(faults)
                outcomes = self._live(self._plan.steps)
            if "unrecoverable" not in outcomes:
                self._pass(gap.seconds)  # survivors may regroup meanwhile, and be struck
            self._faults.end_life()
            if self._plan.moves and faults:
                self._calm()
            for move in gap.moves:
                self._moves.make(move)
            if "unrecoverable" in outcomes and not self._plan.moves:
                break
        self._quiet()

    # ------------------------------------------------------------------ lives

    def _refuse(self, why: str) -> None:
        """No SMP can be started for a reason, and every trainer must be told it. Then there is no such reason any
        more."""
        world = self._world
        world.refusal, world.promptness.calm = why, False
        world.start_trainers(1)
        limit = self._scheduler.now + LIFE_DEADLINE_S
        self._until(lambda: all(trainer.outcome for trainer in world.trainers), limit, self._stop_life)
        world.oracle.checks["said"] += 1
        for trainer in world.trainers:
            if trainer.outcome != "killed" and why not in str(trainer.error):
                raise Violation("said", f"no SMP starts, as {why}, and rank {trainer.rank} is told: {trainer.error}")
        world.refusal = ""

    def _live(self, steps: int, *, quiet: bool = False, ends: bool = False) -> set[str]:
        """Start the trainers and wait until the last one has ended. Returns how they ended."""
        world, scheduler = self._world, self._scheduler
        for node in world.up():
            if not node.serves and scheduler.random.random() < 0.7:
                try:
                    world.ensure_smp(node)
                except Exception as error:  # a fault struck: the trainers will notice
                    scheduler.note(f"the launcher goes on: {error}")
        if not world.up():
            return {"killed"}  # the last node was lost while its SMP was started
        world.start_trainers(steps, quiet=quiet, ends=ends)
        limit = scheduler.now + LIFE_DEADLINE_S + 50 * world.slack_s
        self._until(lambda: any(trainer.outcome for trainer in world.trainers), limit)
        if any(trainer.outcome != "done" for trainer in world.trainers if trainer.outcome):
            self._stop_life()
        self._until(lambda: all(trainer.outcome for trainer in world.trainers), limit, self._stop_life)
        world.oracle.checks["ends"] += 1
        entered = [trainer for trainer in world.trainers if trainer.entered]
        world.oracle.check_same(trainer.restored for trainer in entered)
        self._check()
        world.oracle.checks["bug"] += 1
        for node in world.up():
            if node.smp is not None:
                world.promptness.rested(node.name, node.smp)
        return {trainer.outcome for trainer in world.trainers}

    def _stop_life(self) -> None:
        """If a rank is gone, make the collectives of the others fail, and kill those that do not end by themselves."""
        world, scheduler = self._world, self._scheduler
        if all(trainer.outcome in ("", "done") for trainer in world.trainers):
            return
        self._pass(scheduler.random.choice((0.0, 0.5, 2.0)))
        world.circle.lose()
        self._pass(scheduler.random.choice((0.0, 0.1, 40.0)))
        for trainer in world.trainers:
            if trainer.outcome != "hangs":
                world.kill_trainer(trainer)

    def _until(self, happened: Callable[[], bool], limit: float, act: Callable[[], None] | None = None) -> None:
        world = self._world
        while not happened():
            self._check()
            if self._scheduler.now > limit:
                waiting = "; ".join(self._scheduler.blocked_tasks())
                message = f"a life of the job does not end in time: {waiting}"
                raise Violation("ends", message)
            world.changed.wait_for(happened, 30.0)
            if act is not None and not happened():
                act()

    def _replace(self, replace: bool) -> None:
        world = self._world
        while replace and len(world.up()) < self._plan.nodes:
            world.add_node()
        if not world.up():
            world.add_node()

    def _pass(self, seconds: float) -> None:
        if seconds:
            self._scheduler.sleep(seconds)
        self._check()

    def _check(self) -> None:
        if self._scheduler.violations:
            raise Violation(*self._scheduler.violations[0])

    # ------------------------------------------------------------------ the end

    def _quiet(self) -> None:
        world, final = self._world, self._plan.final
        self._calm()
        state = self._plan.state
        steady = state is None or (state.pace == "steady" and not state.gives_up)
        if not self._recover(self._plan.quiet, "after the faults", progress=self._plan.quiet > 0 and steady):
            return
        if final in ("lose", "lose twice"):
            self._lose(world.oracle.survivable())
            self._replace(True)
            if not self._recover(0 if final == "lose twice" else 1, "after a loss"):
                return
        if final == "lose twice":
            self._pass(60.0 + world.slack_s)  # lost parity is rebuilt in the background
            places = {f"dp{trainer.rank}": trainer.node.name for trainer in world.trainers}
            restored = world.trainers[0].restored
            if self._plan.protect_every == 1 or restored == world.oracle.promised:  # else it may only be sealed
                world.oracle.repaired(restored, places)
            self._lose(world.oracle.survivable())
            self._replace(True)
            if not self._recover(1, "after a second loss"):
                return
        if final == "lose too many":
            self._lose(world.oracle.survivable() + 1)
            self._replace(True)
            if not self._recover(1, "after too many losses"):
                return
        if final == "regroup" and self._plan.regroup_after_s and len(world.up()) > 2:
            self._lose(min(1, world.oracle.survivable()))
            self._pass(self._plan.regroup_after_s * 8 + world.slack_s)
            if not self._recover(1, "after a regrouping"):
                return
        if final == "drain" and len({trainer.node.name for trainer in world.trainers}) > 1:
            self._drain()
        self._end(final == "finish")

    def _drain(self) -> None:
        """Take a node away while the job trains, and lose as many others as the rest promises to stand."""
        world, scheduler = self._world, self._scheduler
        node = scheduler.random.choice(world.trainers).node
        smp, process = node.smp, node.smp_process
        assert smp is not None and process is not None  # no fault has struck since the job came back
        before, answers = world.promptness.starts, list[Drained | HoldfastError]()
        limit_s = DRAIN_S + world.slack_s

        def drain() -> None:
            start = smp.store.state.record.start
            try:
                answers.append(smp.drainer.run(limit_s, (), wait=False))
            except HoldfastError as error:
                if smp.store.state.record.start != start:  # the job was started again meanwhile: once more
                    announce()
                    return
                answers.append(error)
            world.changed.notify()

        def announce() -> None:
            if world.promptness.starts > before and all(trainer.entered for trainer in world.trainers):
                scheduler.spawn(process, "drain", drain)
            else:
                scheduler.call_at(scheduler.awaits + LOOK_AWAITS, announce)

        world.promptness.calm, world.promptness.holds_still = False, True  # a job that ends for a node warns
        world.step_s = max(world.step_s, DRAINED_STEP_S)
        announce()
        self._live(DRAINED_STEPS)
        self._until(lambda: bool(answers), scheduler.now + limit_s)
        world.promptness.holds_still = False
        hooks = [trainer.hook for trainer in world.trainers if trainer.hook is not None]
        trained = {hook._session.progress.step for hook in hooks}
        world.oracle.checks["announced"] += 1
        (answer,) = answers
        if not isinstance(answer, Drained) or answer.snapshot is None:
            raise Violation("announced", f"a node is drained while the job trains: {answer}")
        world.oracle.protected(answer.snapshot)
        world.lose(node, silent=scheduler.random.random() < 0.5, drained=True)
        self._lose(min(answer.tolerates, world.oracle.survivable()))
        self._replace(True)
        if not self._recover(1, "after a drain"):
            raise Violation("announced", f"{answer} was promised, and cannot be restored")
        restored = {trainer.restored for trainer in world.trainers}
        if restored != {answer.snapshot} or trained != {answer.snapshot.step}:
            raise Violation("announced", f"ranks ended after steps {trained}, and go on from {restored}")

    def _calm(self) -> None:
        """End all faults: repair the network, thaw what hangs, end hung trainers later, and give every place a serving
        node."""
        self._world.network.repair()
        for process in (*self._faults.zombies, *self._faults.paused):
            self._scheduler.thaw(process)
        self._pass(CALM_S)
        for process in self._faults.zombies:
            self._scheduler.kill(process, ends=True)
        self._replace(True)
        self._serve()

    def _serve(self) -> None:
        """Have an SMP on every node. Without faults each must come up."""
        for node in self._world.up():
            try:
                self._world.ensure_smp(node)
            except ConfigError as error:
                raise Violation("returns", f"in quiet, {error}") from error

    def _lose(self, count: int) -> None:
        world = self._world
        for node in self._scheduler.random.sample(world.up(), min(count, len(world.up()))):
            world.lose(node, silent=self._scheduler.random.random() < 0.5)

    def _recover(self, steps: int, when: str, *, progress: bool = False) -> bool:
        """Require that the job comes back and goes on. Returns False if it rightly does not."""
        world = self._world
        before, began_s = world.oracle.promised, self._scheduler.now
        for decision in range(DECISIONS + 1):
            self._serve()
            outcomes = self._live(steps * self._plan.every if steps else 0, quiet=True)
            errors = [trainer.error for trainer in world.trainers if trainer.error is not None]
            if not outcomes & {"unrecoverable", "refused"} or not outcomes <= {"unrecoverable", "refused", "killed"}:
                break
            judge = world.oracle.unrecoverable if "unrecoverable" in outcomes else world.oracle.refused
            judge(str(errors[0]))
            self._check()
            if not self._plan.moves:
                return False
            self._decide(decision)
        state = self._plan.state
        if errors and state is not None and state.sizes and all(isinstance(error, StateMismatch) for error in errors):
            world.oracle.of_another_size(str(errors[0]))
            self._check()
            return False
        world.oracle.checks["returns"] += 1
        if outcomes != {"done"}:
            raise Violation("returns", f"{when}, in quiet, the job ends with {outcomes}: {errors}")
        if progress:
            world.oracle.checks["progress"] += 1
            world.promptness.protected(began_s - (world.promised_s - self._scheduler.now))
            if world.oracle.promised in (None, before):
                raise Violation("progress", f"{when}, in quiet, nothing becomes protected")
        return True

    def _decide(self, decision: int) -> None:
        """The user chooses a run that is in reach; or gives all up, the second time at the latest."""
        reach = self._world.oracle.runs.reach
        if decision or self._scheduler.random.random() < 0.5:
            self._moves.give_up(list(reach))
        else:
            self._moves.choose(list(reach))

    def _end(self, finish: bool) -> None:
        world = self._world
        plan = self._plan
        slots = plan.slots + plan.generations - 1
        parities = slots if plan.protect_every == 1 else min(slots, plan.generations + 2)
        for node in world.up():
            world.oracle.check_arena(node.arena, slots + bool(plan.persist_s), parities)
        self._check()
        if finish:
            outcomes = self._live(1, quiet=True, ends=True)
            if outcomes != {"done"}:
                raise Violation("returns", f"the job does not end well: {outcomes}")
            nodes = {trainer.node.name: trainer.node for trainer in world.trainers}
            left = [name for name, node in nodes.items() if node.arena.exists()]
            world.oracle.checks["free"] += 1
            if left:
                raise Violation("free", f"the job has ended, and its memory on {left} is not free")
        world.promptness.calm = False
        for node in world.gone():
            if node.smp_process is not None:
                self._scheduler.kill(node.smp_process)
        for node in world.up():
            if node.smp is not None:
                node.smp.stopped.set()
        self._pass(REST_S + 2 * world.slack_s)
        waiting = self._scheduler.blocked_tasks()
        stuck = [line for line in waiting if not line.startswith("driver/")]
        world.oracle.checks["rest"] += 1
        if stuck:
            raise Violation("rest", f"nothing is left to do, and these still wait: {'; '.join(stuck)}")
