"""Nodes, their SMPs and the trainers on them, as processes that can be started, killed and lost."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import fsspec

from holdfast.smp_daemon.persist.manifest import run_of, snapshot_of
from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    SmpUnavailable,
    Unrecoverable,
)
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.paths import Owner
from holdfast.smp_daemon.shared.populate import slices
from holdfast.smp_daemon.shared.runs import GIVE_UP_ENV, RUN_ENV
from holdfast.snapshot.first_turns import Checks
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.options import Options
from holdfast.snapshot.resume.choice import PERSISTED
from holdfast.snapshot.step.ledger import Ledger
from tests.proof.sim.costs import SLICES
from tests.proof.sim.memory import Disk, MemoryPath
from tests.proof.sim.modules import NEVER, SimScript
from tests.proof.sim.network import Network, use
from tests.proof.sim.oracle import Content, Oracle
from tests.proof.sim.plan import SeedPlan
from tests.proof.sim.promptness import CONNECTED, Promptness
from tests.proof.sim.runs import Snapshot
from tests.proof.sim.scheduler import Scheduler
from tests.proof.sim.seams import Hooks
from tests.proof.sim.sized import back_s, copy_s
from tests.proof.sim.system import SYSTEM
from tests.proof.sim.tasks import SimProcess
from tests.proof.sim.threads import Signal
from tests.proof.sim.trainer import (
    COLLECTIVE_DEADLINE_S,
    WAIT_S,
    Bytes,
    Circle,
    QuietSteps,
    SimAdapter,
    SimMember,
    Steps,
    TrainingLost,
)

JOB = "job"
PLACE = "memory://storage"
START_DEADLINE_S = 60.0
DRAIN_DEADLINE_S = 60.0
SLOW_STEPS = 40
"""In how many steps memory must be reserved, if bytes cost something."""

COMES_S = 60.0
"""How often at least a unit comes, of those that a simulated unit stands for."""

AGAIN_S = 0.5
"""Pause after an SMP did not come up, before another is started, in simulated seconds."""


class SimNode:
    """A host with memory: one SMP at a time, and trainers.

    Attributes:
        up: whether it was not lost.
        side: see `Network.sides`. The job runs on side 0.
    """

    def __init__(self, name: str, host: str, base: MemoryPath) -> None:
        self.name = name
        self.host = host
        self.base = base
        self.arena = base / JOB
        self.up = True
        self.smp_process: SimProcess | None = None
        self.smp: Smp | None = None
        self.trainers: list[SimProcess] = []
        self.starting = False
        self.side = 0
        self.error = ""
        self.refusal: HoldfastError | None = None

    @property
    def serves(self) -> bool:
        """Whether its SMP has come up, and is alive."""
        return self.smp is not None and self.smp_process is not None and self.smp_process.alive


class SimTrainer:
    """One rank in one life of the job."""

    def __init__(self, rank: int, life: int, node: SimNode, process: SimProcess) -> None:
        self.rank = rank
        self.life = life
        self.node = node
        self.process = process
        self.outcome = ""
        self.error: BaseException | None = None
        self.hook: SnapshotHook | None = None
        self.restored: Snapshot | None = None
        self.entered = False


class _Hook(SnapshotHook):
    """The hook of a `SimAdapter`, without checks: its loop restores its own state, and draws no random numbers."""

    checks = Checks(resumption=False, reading=False)
    system = SYSTEM


class World:
    """The machines of one history.

    Attributes:
        wanted, over: what the next start gets as ``HOLDFAST_RUN`` and ``HOLDFAST_GIVE_UP``.
        promised_s: when the job was last told that a younger snapshot is protected.
        refusal: why no SMP can be started now; empty: they can.
        promptness: the checks of how long things take.
        slack_s: how much longer than a few bytes the bytes of this plan may take, in seconds.
    """

    def __init__(self, plan: SeedPlan, scheduler: Scheduler) -> None:
        self.plan = plan
        self.step_s = plan.step_s
        self.scheduler = scheduler
        disk = Disk()
        self.network = Network(scheduler, disk)
        use(self.network)
        self.network.latency_s = plan.latency_s
        self.network.capacity = plan.capacity
        self.network.flip_chance = plan.flip_chance
        self.network.break_chance = plan.break_chance
        self.network.costs = scheduler.costs = plan.costs
        self.slack_s = back_s(plan)
        self.promised_s = 0.0
        self.refusal = ""
        self.oracle = Oracle(scheduler.violate)
        self.promptness = Promptness(plan, scheduler, self.oracle.checks)
        self.disk = disk
        self.changed = Signal()
        self.nodes: list[SimNode] = []
        self.trainers: list[SimTrainer] = []
        self.seats: dict[int, SimNode] = {}
        self.lengths = list(plan.lengths)
        self.hits: Counter[str] = Counter()
        self.crashes: Counter[str] = Counter()
        self.faults: Counter[str] = self.network.counts
        self.at_point: Callable[[str, SimProcess], None] = lambda point, process: None
        self.wanted = ""
        self.over: set[str] = set()
        self._beginning: dict[str, set[SimProcess]] = defaultdict(set)
        self._named = 0
        self._lives = 0
        self._sides = 0
        self._struck = -1
        self._members: dict[SimProcess, SimMember] = {}
        self._scripts: dict[SimProcess, SimScript] = {}
        storage = fsspec.filesystem("memory")
        storage.store.clear()
        storage.pseudo_dirs[:] = [""]
        self._hook_up()
        for _ in range(plan.nodes):
            self.add_node()

    def _hook_up(self) -> None:
        Hooks.failpoint = self._failpoint
        Hooks.start_smp = self._start_by_trainer
        Hooks.connected = lambda began_s: self.promptness.connected(str(self.scheduler.current.process), began_s)
        Hooks.answered = lambda *call: self.promptness.answered(str(self.scheduler.current.process), *call)
        Hooks.agreement = self._agreement
        Hooks.captured = self._note_captured
        Hooks.begun = self._note_begun
        Hooks.goes_back = self.oracle.goes_back
        Hooks.committed = self._committed
        Hooks.given_up = self.oracle.given_up
        Hooks.promised = self._note_promise
        Hooks.wanted = self.oracle.wanted
        Hooks.unit_bytes = lambda longest, data: self.plan.unit_bytes
        Hooks.enters = self._note_entering
        Hooks.stored = self.oracle.stored
        Hooks.at_once = lambda length: not self.plan.beside
        Hooks.works = self._note_work
        Hooks.fetched = self._note_fetched
        Hooks.slices = slices if self.plan.costs is None else _slices
        SYSTEM.begin_run(self._launch)

    def _note_work(self, what: str, count: int, at_once: bool) -> None:
        """Bytes of a slot are reserved, digested or overwritten. A real node has so many that it takes minutes."""
        self.oracle.checks["lock"] += 1
        if not at_once and (held := self._held_lock()) is not None:
            self.scheduler.violate("lock", f"{held}: with the store's lock held, bytes are worked on: {what}")
        costs = self.plan.costs
        if costs is not None and self.scheduler.current.number in self.network.serving:
            self.scheduler.sleep(costs.first_s(what, count))
        else:
            self.scheduler.work(what, count)

    def _held_lock(self) -> str | None:
        """The node whose store's lock the current task holds; only tasks of its SMP can."""
        process = self.scheduler.current.process
        for node in self.nodes:
            if node.smp_process is process and node.smp is not None:
                lock: Any = node.smp.store.changed
                return node.name if lock.is_mine else None
        return None

    def _note_fetched(self, count: int, moved: Callable[[], None]) -> None:
        """A unit has come, of all those that it stands for. `moved` is called now and then while the others come."""
        costs, host = self.plan.costs, self.scheduler.current.process.host
        if costs is None:
            return
        with self.network.stream("", host) as share:
            left_s = share * costs.rest_s("network", count)
            while left_s > 0:
                self.scheduler.sleep(min(left_s, COMES_S))
                left_s -= COMES_S
                moved()

    # ------------------------------------------------------------------ nodes

    def add_node(self) -> SimNode:
        """A new node, with empty memory."""
        number = self._named
        self._named += 1
        node = SimNode(f"n{number}", f"10.0.{number // 250}.{number % 250}", MemoryPath(self.disk, "", f"n{number}"))
        node.base.mkdir(mode=0o700)
        self.nodes.append(node)
        return node

    def up(self) -> list[SimNode]:
        """Nodes that have not been lost, and are not gone."""
        return [node for node in self.nodes if node.up and not node.side]

    def gone(self) -> list[SimNode]:
        """Nodes that are out of reach with all that they hold."""
        return [node for node in self.nodes if node.up and node.side]

    def place(self, here: Sequence[SimNode]) -> None:
        """From now on only these nodes are in reach. Those that go now are gone together."""
        self._sides += 1
        for node in self.nodes:
            if node in here:
                node.side = 0
                self.network.sides.pop(node.host, None)
            elif node.up and not node.side:
                self.scheduler.tell(node.name, "is cut off, with its memory")
                node.side = self.network.sides[node.host] = self._sides
        self.seats = dict(enumerate(here))

    def ensure_smp(self, node: SimNode) -> None:
        """Have an SMP serve the node. Blocks. Raises `ConfigError` if none comes up."""
        scheduler = self.scheduler
        limit = scheduler.now + START_DEADLINE_S
        while not node.serves:
            if not node.up or scheduler.now > limit:
                raise ConfigError(f"no SMP on {node.name}: {node.error}")
            if not (node.starting and node.smp_process is not None and node.smp_process.alive):
                self._start(node)
            self.changed.wait_for(lambda: node.serves or not node.starting, 1.0)
            if not node.serves:
                scheduler.sleep(AGAIN_S)

    def _launch(self, arena: str, deadline_s: float) -> Owner:
        """The command that starts an SMP: it waits until the SMP serves or says why not."""
        node = next(node for node in self.nodes if str(node.arena) == arena)
        if node.smp_process is not None and node.smp_process.alive:
            self._import(node, SimProcess(f"{node.name}.smp", node.host))
            raise ConfigError(f"{arena} is in use")
        self._start(node)
        process = node.smp_process
        assert process is not None
        self.changed.wait_for(lambda: node.serves or not process.alive, deadline_s)
        if node.smp is not None and node.serves:
            return node.smp.owner
        if process.alive:
            raise DeadlineExceeded(f"the SMP did not start within {deadline_s:.0f} s")
        raise node.refusal or SmpUnavailable("the SMP ended without a report")

    def _start(self, node: SimNode) -> None:
        process = SimProcess(f"{node.name}.smp", node.host)
        self.promptness.launched(node.name, node.smp_process is not None)
        node.smp_process, node.smp, node.starting, node.refusal = process, None, True, None
        process.on_death[0] = lambda: self._smp_gone(node, process)
        self.scheduler.note(f"an SMP is started on {node.name}")
        self.scheduler.spawn(process, "main", lambda: self._run_smp(node, process))

    def _run_smp(self, node: SimNode, process: SimProcess) -> None:
        environment = {
            "HOLDFAST_PRIORITY": "normal",
            "HOLDFAST_BACKEND": "numpy" if self.plan.seed % 2 else "auto",
            "HOLDFAST_REGROUP_AFTER": f"{self.plan.regroup_after_s}s",
            "HOLDFAST_REBUILD": self.plan.rebuild,
            "HOLDFAST_LINKS": str(self.plan.links),
            "HOLDFAST_PERSIST": PLACE if self.plan.persist_s else "",
            "HOLDFAST_PERSIST_EVERY": f"{self.plan.persist_s}s" if self.plan.persist_s else "",
        }
        self._import(node, process)
        began_s = self.scheduler.now
        try:
            if self.refusal:
                raise ConfigError(self.refusal)
            smp = Smp(JOB, node.name, node.arena, node.host, environment=environment, system=SYSTEM)  # type: ignore[arg-type]
        except HoldfastError as error:
            node.error, node.refusal = str(error), error
            node.starting = False
            self.scheduler.note(f"the SMP of {node.name} does not come up: {error}")
            self.scheduler.kill(process, ends=True)
            return
        smp._scrubber._pacer.rate /= self.plan.scale  # less than HOLDFAST_SCRUB can say
        self.promptness.served(node.name, began_s)
        node.smp, node.starting = smp, False
        self.changed.notify()
        smp.stopped.wait()
        smp.close()
        self.scheduler.kill(process, ends=True)

    def _import(self, node: SimNode, process: SimProcess) -> None:
        """A process of a node begins: it imports its modules, as others do that begin at the same time."""
        if self.plan.costs is not None:
            beginning = self._beginning[node.host]
            beginning.add(process)
            self.scheduler.sleep(self.plan.costs.starting_s(sum(each.alive for each in beginning)))
            beginning.discard(process)

    def _smp_gone(self, node: SimNode, process: SimProcess) -> None:
        if node.smp_process is process:
            node.smp, node.starting = None, False
        self.changed.notify()

    def _start_by_trainer(self, arena: MemoryPath) -> None:
        """`smp_daemon.shared.spawn.start_smp`."""
        self.ensure_smp(next(node for node in self.nodes if node.arena == arena))

    def lose(self, node: SimNode, *, silent: bool, drained: bool = False) -> None:
        """Lose a node, with its memory and all its processes.

        Args:
            silent: its connections are not closed.
            drained: it says that nothing there is needed, so its loss must cost nothing.
        """
        if not node.up:
            return
        self.scheduler.tell(node.name, "is taken away" if drained else "is lost")
        self.promptness.calm = False
        node.up = False
        if not drained:
            self.oracle.node_lost(node.name)
        if silent:
            self.network.lose_host(node.host)
        for process in node.trainers:
            self.scheduler.kill(process, ends=True)
        if node.smp_process is not None:
            self.scheduler.kill(node.smp_process, ends=True)
        self.network.lose_host(node.host)
        self.disk.remove(str(node.base))
        if not any((each.arena / "node.json").exists() for each in self.nodes if each.up):
            self.oracle.all_lost()

    # ------------------------------------------------------------------ trainers

    def start_trainers(self, steps: int, *, quiet: bool = False, ends: bool = False) -> None:
        """Begin a life of the job on all nodes that are up.

        Args:
            quiet: whether there are no faults, so that every snapshot must become protected.
            ends: whether the job is done for good after these steps.
        """
        self.promptness.starts += 1
        up = self.up()
        ranks = self._ranks_of_a_life()
        circle = Circle(len(ranks), COLLECTIVE_DEADLINE_S + self.slack_s)
        self.circle = circle
        self.trainers = []
        spare = [node for node in up if node not in self.seats.values()]
        for number in sorted(set(ranks)):
            if not (number in self.seats and self.seats[number] in up):
                self.seats[number] = spare.pop(0) if spare else up[number % len(up)]
        for rank, number in enumerate(ranks):
            node = self.seats[number]
            trainer = SimTrainer(rank, self._lives, node, SimProcess(f"{node.name}.t{rank}", node.host))
            self.trainers.append(trainer)
            node.trainers.append(trainer.process)
            trainer.process.on_death[0] = self._trainer_over(trainer, "killed")
        floor = self.oracle.runs.floors([node.arena for node in up])
        self._struck = self.faults.total()
        if not self._is_calm():
            self._struck = -1
        for trainer in self.trainers:
            work = partial(self._train, trainer, circle, steps, floor, quiet, ends)
            self.scheduler.spawn(trainer.process, "train", work)

    def _ranks_of_a_life(self) -> Sequence[int]:
        """By rank, the number of the node that it starts on."""
        sizes = self.plan.state.sizes if self.plan.state is not None else ()
        self._lives += 1
        if not sizes:
            return self.plan.ranks
        self.oracle.changes()
        # A single rank on a new node cannot hear of other nodes: those that know the job are taken first.
        seats = sorted(range(self.plan.nodes), key=lambda number: (not self._remembers(number), number))
        return [seats[rank % len(seats)] for rank in range(sizes[self._lives % len(sizes)])]

    def _remembers(self, number: int) -> bool:
        node = self.seats.get(number)
        return node is not None and node.up and (node.arena / "node.json").exists()

    def kill_trainer(self, trainer: SimTrainer) -> None:
        """SIGKILL."""
        self.scheduler.kill(trainer.process)

    def _trainer_over(self, trainer: SimTrainer, outcome: str) -> Callable[[], None]:
        def over() -> None:
            trainer.outcome = trainer.outcome or outcome
            self.changed.notify()

        return over

    def _train(
        self, trainer: SimTrainer, circle: Circle, steps: int, floor: dict[str, Snapshot], quiet: bool, ends: bool
    ) -> None:
        try:
            self._train_steps(trainer, circle, steps, floor, quiet, ends)
            trainer.outcome = "done"
        except (HoldfastError, TrainingLost) as error:
            self.scheduler.tell(f"dp{trainer.rank}", f"ends: {type(error).__name__}: {error}")
            trainer.error = error
            trainer.outcome = _outcome(error)
        self.scheduler.kill(trainer.process, ends=True)

    def _train_steps(
        self, trainer: SimTrainer, circle: Circle, steps: int, floor: dict[str, Snapshot], quiet: bool, ends: bool
    ) -> None:
        plan, rank = self.plan, trainer.rank
        self._import(trainer.node, trainer.process)
        self._members[trainer.process] = SimMember(circle, rank)
        arena: Any = trainer.node.base  # a `MemoryPath` in place of a path
        state = plan.state
        pace = state.pace if state is not None else "steady"
        options = Options(
            job=JOB,
            every="auto" if pace == "auto" else plan.every,
            protect_every=plan.protect_every,
            protect=plan.protect,
            domains="",
            slots=plan.slots,
            generations=plan.generations,
            keep=not ends,
            arena=arena,
            elastic=state is not None and bool(state.sizes),
            run=self.wanted,
            give_up=tuple(sorted(self.over)),
            deadline_s=60.0 + CONNECTED * copy_s(plan),
            block=1,  # every life of a trainer is a process of its own
        )
        train = self._train_bytes if state is None else self._train_modules
        train(trainer, circle, options, steps, floor, quiet and steps > 0)

    def _train_bytes(
        self,
        trainer: SimTrainer,
        circle: Circle,
        options: Options,
        steps: int,
        floor: dict[str, Snapshot],
        drains: bool,
    ) -> None:
        rank, coord = trainer.rank, f"dp{trainer.rank}"
        loaded: list[Bytes] = []
        adapter: Any = SimAdapter(
            coord, self.lengths[rank], str(self.plan.seed), self._lives, lambda _, content: loaded.append(content)
        )
        meet = self._meeting(circle, rank)
        with _Hook(adapter, options) as hook:
            self._note_restored(trainer, hook, floor, loaded[-1] if loaded else None)
            to_do = self._steps(hook, coord, steps, drains)
            while to_do.left:
                self._timed(coord, hook.begin)
                to_do.begun()
                self._work_a_while()
                meet(adapter.step)
                self._timed(coord, hook.before_step)
                if len(adapter.live) != self.lengths[rank]:
                    adapter.resize(self.lengths[rank])
                adapter.train()
                self._timed(coord, hook.after_step)
            hook.begin()

    def _train_modules(
        self,
        trainer: SimTrainer,
        circle: Circle,
        options: Options,
        steps: int,
        floor: dict[str, Snapshot],
        drains: bool,
    ) -> None:
        coord = f"dp{trainer.rank}"
        drawn = self.plan.state
        assert drawn is not None
        meet = self._meeting(circle, trainer.rank)
        script = SimScript(drawn, self.plan.seed, trainer.rank, meet, self._work_a_while)
        self._scripts[trainer.process] = script
        with script.hook(options, SYSTEM) as hook:
            content = script.state_to_begin_with(hook.restored.rewind) if hook.restored.snapshot else None
            self._note_restored(trainer, hook, floor, content)
            script.train(hook, self._steps(hook, coord, steps, drains))

    def _timed(self, coord: str, call: Callable[[], None]) -> None:
        """Something that the training thread calls in every step."""
        began_s = self.scheduler.now
        call()
        self.promptness.stepped(coord, began_s)

    def _steps(self, hook: SnapshotHook, coord: str, steps: int, drains: bool) -> Steps:
        if not drains and self.plan.costs is None:
            return Steps(steps)
        drain = partial(self._drain, hook, coord) if drains else lambda: None
        wait_s = WAIT_S + self.slack_s / SLOW_STEPS
        return QuietSteps(steps, self.plan.every, partial(_has_no_room, hook), drain, wait_s)

    def _meeting(self, circle: Circle, rank: int) -> Callable[[Any], list[Any]]:
        """Return a function that exchanges values between all ranks, for the steps of this life."""
        turns = itertools.count()

        def meet(value: Any) -> list[Any]:
            turn = ("step", next(turns))
            circle.post(turn, rank, value)
            everyones = circle.collect(turn)
            if everyones is None:
                raise TrainingLost("another rank is gone")
            return everyones

        return meet

    def _work_a_while(self) -> None:
        self.scheduler.sleep(self.step_s * self.scheduler.random.random())

    def _note_restored(
        self, trainer: SimTrainer, hook: SnapshotHook, floor: dict[str, Snapshot], content: Content | None
    ) -> None:
        restored, coord = hook.restored.snapshot, f"dp{trainer.rank}"
        trainer.restored, trainer.entered, trainer.hook = restored, True, hook
        self._note_promise(hook._session.protecting.ledger)
        self.scheduler.tell(coord, _beginning(hook))
        if trainer.outcome != "hangs":  # else it was given up, and nobody listens to it
            persisted = hook.restored.tier == PERSISTED
            self.oracle.restored(coord, hook.restored.epoch, restored, content, persisted, alone=self._is_calm())
            if not persisted:  # a restart from storage may undo what was protected
                self.oracle.check_floor(coord, restored, floor.get(self.oracle.run))
            self.oracle.begins(coord, hook.restored.epoch, hook.restored.run.id, trainer.life, restored)
            self.wanted, self.over = "", set()
        else:
            self.oracle.runs.begins(hook.restored.epoch, hook.restored.run.id, trainer.life)

    def _drain(self, hook: SnapshotHook, coord: str) -> None:
        drained, state = hook.drain(DRAIN_DEADLINE_S + 10 * self.slack_s), self.plan.state
        if state is not None and (state.gives_up or (state.grows_late and self._has_grown(hook))):
            return
        self.oracle.checks["progress"] += 1
        if not drained:
            self.scheduler.violate("progress", f"{coord}: in quiet, not every snapshot becomes protected")

    def _has_grown(self, hook: SnapshotHook) -> bool:
        """Whether the state of a rank needs another layout, or has just got one.

        Then snapshots that are not protected yet are given up: those of other ranks in that step, and all earlier ones.
        """
        session = hook._session
        sessions = [trainer.hook._session for trainer in self.trainers if trainer.hook is not None]
        return any(snapshot.epoch < session.progress.epoch for snapshot in session.protecting.copies) or any(
            not each.protecting.layouts.fits for each in sessions
        )

    def _note_begun(self, snapshot: SnapshotId, coord: str) -> None:
        """A snapshot of a script is taken."""
        content = self._scripts[self.scheduler.current.process].boundary
        self._note_captured(snapshot, coord, content, begins=content is not NEVER)

    def _note_captured(self, snapshot: SnapshotId, coord: str, content: Content, *, begins: bool = True) -> None:
        self.oracle.captured(snapshot, coord, content, begins=begins)

    def _note_entering(self) -> None:
        """A trainer of this life knows what is in reach, and no trainer of it has begun anything yet."""
        trainer = next((each for each in self.trainers if each.process is self.scheduler.current.process), None)
        if trainer is not None and trainer.outcome != "hangs":
            arenas = list(dict.fromkeys(each.node.arena for each in self.trainers))
            noted, found = (noted_at_place(), {*found_at_place()}) if self.plan.persist_s else ((), ())
            self.oracle.enters(arenas, noted, found, self.wanted, self.over)

    def _note_promise(self, ledger: Ledger) -> None:
        if ledger.protected is not None:
            if self.oracle.promised is None or ledger.protected > self.oracle.promised:
                self.promised_s = self.scheduler.now
                self.scheduler.tell("the job", f"is told that {ledger.protected} is protected")
            self.oracle.protected(ledger.protected)
        roomy = self.plan.slots > 2 and ledger.restored is None
        self.oracle.sealed(ledger.sealed if roomy else None)

    def _is_calm(self) -> bool:
        """Whether no fault has struck since this life began, and none from before lasts.

        Then everything that survives a crash of processes must be restored.
        """
        smps = [node.smp_process for node in self.up() if node.smp_process is not None]
        stands = any(process.frozen or process.slow_s for process in smps)
        return not (self.network.cut or stands) and self.faults.total() == self._struck

    # ------------------------------------------------------------------ called through the seams

    def _agreement(self) -> Any:
        return self._members[self.scheduler.current.process]

    def _committed(self, path: MemoryPath, kind: str, data: Any) -> None:
        self.oracle.committed(path, kind, data)

    def _failpoint(self, point: str, step: int) -> None:
        self.hits[point] += 1
        if Hooks.is_due(point):
            self.at_point(point, self.scheduler.current.process)
            self.scheduler.yield_if_dead()


def _slices(length: int) -> Iterable[tuple[int, int]]:
    """`populate.slices` of a slot of real size."""
    part = -(-length // SLICES)
    return ((start, min(part, length - start)) for start in range(0, length, part))


def found_at_place() -> dict[str, dict[str, list[str]]]:
    """What storage has of snapshots, whole or not: by run and the name of a snapshot's directory, the files there."""
    found: dict[str, dict[str, list[str]]] = {}
    paths: list[str] = sorted(fsspec.filesystem("memory").store)
    for path in paths:
        *_, folder, directory, _ = ["", "", *path.split("/")]
        run = run_of(folder)
        if run is not None and snapshot_of(directory) is not None:
            found.setdefault(run[1], {}).setdefault(directory, []).append(path)
    return found


def noted_at_place() -> set[str]:
    """The runs that storage knows of: each writes a file of its own as it begins to persist."""
    found = (run_of(path.rpartition("/")[2]) for path in fsspec.filesystem("memory").store)
    return {run[1] for run in found if run is not None}


def _outcome(error: BaseException) -> str:
    """How a trainer ended that ended with this error."""
    if isinstance(error, Unrecoverable):
        return "unrecoverable"
    is_refused = isinstance(error, ConfigError) and (RUN_ENV in str(error) or GIVE_UP_ENV in str(error))
    return "refused" if is_refused else "failed"


def _has_no_room(hook: SnapshotHook) -> bool:
    """Whether memory is still being reserved, or every slot is taken until the restored snapshot has parity again."""
    protecting = hook._session.protecting
    ledger = protecting.ledger
    return protecting.layouts.is_reserving or (ledger.restored is not None and not ledger.may_begin)


def _beginning(hook: SnapshotHook) -> str:
    restored = hook.restored
    if restored.snapshot is None:
        return f"begins from nothing, in epoch {restored.epoch}"
    return f"goes on from {restored.snapshot} ({restored.how}), in epoch {restored.epoch}"
