"""Faults as they strike. Which machine a fault hits is drawn at that moment."""

from __future__ import annotations

from collections import defaultdict

from holdfast.smp_daemon.shared.plain import decode_digested
from tests.proof.sim.memory import MemoryPath
from tests.proof.sim.plan import DrawnFault
from tests.proof.sim.seams import Hooks
from tests.proof.sim.tasks import SimProcess
from tests.proof.sim.world import SimNode, SimTrainer, World

SILENT_CHANCE = 0.5
FROZEN_S, LONG_FROZEN_S = 20.0, 300.0
CUT_S = 45.0


class Faults:
    """Makes the faults of a life strike, each at its await or failpoint."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.scheduler.random
        self._at_points: dict[str, list[tuple[int, DrawnFault]]] = defaultdict(list)
        self._life = 0
        self.zombies: list[SimProcess] = []
        self.paused: list[SimProcess] = []
        world.at_point = self._point
        Hooks.is_due = self._at_points.__contains__

    def begin_life(self, faults: tuple[DrawnFault, ...]) -> None:
        """Schedule these faults, and drop those scheduled earlier that have not struck yet."""
        self._life += 1
        self._at_points.clear()
        world, life = self._world, self._life
        for fault in faults:
            if fault.point:
                self._at_points[fault.point].append((world.hits[fault.point] + fault.nth, fault))
            else:

                def strike(fault: DrawnFault = fault) -> None:
                    if self._life == life:
                        self._strike(fault.kind)

                if fault.at_s:
                    world.scheduler.at(world.scheduler.now + fault.at_s, strike)
                else:
                    world.scheduler.call_at(world.scheduler.awaits + fault.awaits, strike)

    def end_life(self) -> None:
        """Drop the faults that have not struck yet."""
        self.begin_life(())

    # ------------------------------------------------------------------ striking

    def _point(self, point: str, process: SimProcess) -> None:
        planned = self._at_points.get(point)
        if not planned or process is self._world.scheduler.root:
            return
        due = [item for item in planned if item[0] <= self._world.hits[point]]
        for item in due:
            planned.remove(item)
            self._world.crashes[point] += 1
            if item[1].kind == "lose-node":
                node = next(node for node in self._world.nodes if node.host == process.host)
                self._count("lose-node")
                self._world.lose(node, silent=self._random.random() < SILENT_CHANCE)
            else:
                self._count("kill-process")
                self._world.scheduler.kill(process)

    def _count(self, kind: str) -> None:
        self._world.promptness.calm = False
        self._world.faults[kind] += 1

    def _strike(self, kind: str) -> None:
        world = self._world
        smps = [node for node in world.up() if node.smp_process is not None and node.smp_process.alive]
        trainers = [trainer for trainer in world.trainers if trainer.process.alive]
        if kind in ("kill-trainer", "zombie-trainer", "kill-trainers") and not trainers:
            return
        if kind in ("kill-smp", "pause-smp", "flip-stored") and not smps:
            return
        if kind in ("lose-node", "lose-nodes") and len(world.up()) < 2:
            return
        world.scheduler.note(f"strikes: {kind}")
        {
            "kill-trainer": lambda: self._kill(self._random.choice(trainers)),
            "kill-trainers": lambda: self._kill(*trainers),
            "kill-smp": lambda: self._kill_smp(self._random.choice(smps)),
            "lose-node": lambda: self._lose(1),
            "lose-nodes": lambda: self._lose(self._random.randint(2, 3)),
            "pause-smp": lambda: self._freeze(self._random.choice(smps)),
            "zombie-trainer": lambda: self._make_zombie(self._random.choice(trainers)),
            "partition": self._cut,
            "slow-node": self._slow,
            "flip-stored": lambda: self._flip(self._random.choice(smps)),
            "grow-state": self._grow,
        }[kind]()

    def _kill(self, *trainers: SimTrainer) -> None:
        for trainer in trainers:
            self._count("kill-trainer")
            self._world.kill_trainer(trainer)

    def _kill_smp(self, node: SimNode) -> None:
        self._count("kill-smp")
        assert node.smp_process is not None
        self._world.scheduler.kill(node.smp_process)

    def _lose(self, count: int) -> None:
        up = self._world.up()
        count = min(count, len(up) - 1)
        self._count("lose-node" if count == 1 else "lose-nodes")
        for node in self._random.sample(up, count):
            self._world.lose(node, silent=self._random.random() < SILENT_CHANCE)

    def _freeze(self, node: SimNode) -> None:
        self._count("pause-smp")
        scheduler, process = self._world.scheduler, node.smp_process
        assert process is not None
        scheduler.freeze(process)
        self.paused.append(process)
        most_s = FROZEN_S if self._world.plan.costs is None else LONG_FROZEN_S
        scheduler.at(scheduler.now + self._random.random() * most_s, lambda: scheduler.thaw(process))

    def _make_zombie(self, trainer: SimTrainer) -> None:
        """Make a trainer hang. Its launcher gives it up but cannot kill it, and within 10 s it goes on."""
        self._count("zombie-trainer")
        scheduler = self._world.scheduler
        scheduler.freeze(trainer.process)
        trainer.outcome = "hangs"
        self.zombies.append(trainer.process)
        scheduler.at(scheduler.now + self._random.random() * 10, lambda: scheduler.thaw(trainer.process))
        self._world.changed.notify()

    def _cut(self) -> None:
        self._count("partition")
        scheduler, network = self._world.scheduler, self._world.network
        host = self._random.choice(self._world.up()).host
        network.cut.add(host)
        scheduler.tell(host, "is cut off")
        scheduler.at(scheduler.now + self._random.random() * CUT_S, lambda: network.cut.discard(host))

    def _slow(self) -> None:
        self._count("slow-node")
        scheduler = self._world.scheduler
        node = self._random.choice(self._world.up())
        scheduler.tell(node.name, "is slow for a while")
        processes = [trainer.process for trainer in self._world.trainers if trainer.node is node]
        if node.smp_process is not None:
            processes.append(node.smp_process)
        for process in processes:
            process.slow_s = 0.02

        def recover() -> None:
            for process in processes:
                process.slow_s = 0.0

        scheduler.at(scheduler.now + 5.0, recover)

    def _flip(self, node: SimNode) -> None:
        """Flip one bit of a sealed slot of a node, of data or of parity."""
        sealed = sorted(path for path in node.arena.glob("*.*.*.json"))
        if not sealed:
            return
        record = self._random.choice(sealed)
        data = decode_digested(record.read_bytes())
        self._count("flip-stored")
        self._world.scheduler.tell(node.name, f"a bit of {record.name} flips: {data['snapshot']}")
        self._world.oracle.bit_flipped((data["snapshot"][0], data["snapshot"][1]))
        flip_bit(record.with_suffix(""), self._random.random())

    def _grow(self) -> None:
        self._count("grow-state")
        self._world.scheduler.tell("the state", "grows")
        self._world.oracle.changes()
        lengths = self._world.lengths
        for rank in range(len(lengths)):
            lengths[rank] += 17


def flip_bit(path: MemoryPath, where: float) -> None:
    """Flip one bit of a file. `where`: its place, as a fraction of the file."""
    content = path.file().content
    bit = int(where * len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
