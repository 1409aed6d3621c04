"""What happens to machines, memory and runs between two lives of a job; see `plan.MOVES`."""

from __future__ import annotations

from collections.abc import Sequence

import fsspec

from holdfast.smp_daemon.persist.manifest import snapshot_of
from tests.proof.sim.world import SimNode, World, found_at_place

LOST_CHANCE = 0.3
DAMAGES = ("cut off", "flipped", "removed")
NEEDED = (".safetensors", ".safetensors.json", "snapshot.json")
"""The files of a persisted snapshot without which it is not whole."""


class Moves:
    """Makes them happen. No trainer runs meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.scheduler.random

    def make(self, what: str) -> None:
        """Make one of `plan.MOVES`."""
        world, pick = self._world, self._random
        world.scheduler.note(f"moves: {what}")
        world.faults[what] += 1
        here, gone = world.up(), world.gone()
        match what:
            case "all go":
                self._place(())
            case "some go" if len(here) > 1:
                self._place(pick.sample(here, pick.randrange(1, len(here))))
            case "swap":
                self._place(gone)
            case "mix":
                self._place(pick.sample([*here, *gone], pick.randint(1, len([*here, *gone]))), lost=LOST_CHANCE)
            case "all come":
                self._place([*pick.sample(gone, len(gone)), *here])
            case "all lost":
                for node in here:
                    world.lose(node, silent=True)
            case "lose memory":
                for node in (*here, *gone):
                    world.lose(node, silent=True)
            case "give up":
                self.give_up(world.oracle.runs.known()[-1:])
            case "choose":
                self.choose(world.oracle.runs.known())
            case "damage a node":
                self._damage(pick.choice(here) if here else None)
            case "damage storage":
                self._damage_storage()
        world.oracle.moved([node.name for node in world.gone()])

    def give_up(self, runs: Sequence[str]) -> None:
        """The next start gives these runs up."""
        self._world.over |= set(runs)
        self._world.oracle.runs.over |= set(runs)
        self._world.wanted = ""
        self._world.scheduler.tell("the user", f"gives up {', '.join(runs) or 'nothing'}")

    def choose(self, runs: Sequence[str]) -> None:
        """The next start goes on with one of these runs."""
        choices = [run for run in runs if run not in self._world.over]
        if choices:
            self._world.wanted = self._random.choice(choices)
            self._world.scheduler.tell("the user", f"chooses run {self._world.wanted}")

    def _place(self, here: Sequence[SimNode], lost: float = 0.0) -> None:
        world = self._world
        here = here[: world.plan.nodes]
        for node in [*world.up(), *world.gone()]:
            if node not in here and self._random.random() < lost:
                world.lose(node, silent=True)
        world.place(self._random.sample(here, len(here)))
        for node in here:
            world.scheduler.tell(node.name, "is here")

    def _damage(self, node: SimNode | None) -> None:
        """One of the small files of a node's arena is damaged while no SMP runs. That counts as the node's loss."""
        files = sorted(node.arena.glob("*.json")) if node is not None else []
        files = [path for path in files if path.name != "smp.json"]
        if node is None or not files:
            return
        if node.smp_process is not None:
            self._world.scheduler.kill(node.smp_process)
        path = self._random.choice(files)
        how = self._random.choice(DAMAGES)
        self._world.scheduler.tell(node.name, f"has {path.name} {how}")
        self._world.oracle.node_lost(node.name)
        self._world.oracle.runs.damaged(path)
        content = damaged(path.read_bytes(), how, self._random.random())
        path.unlink() if content is None else path.write_bytes(content)

    def _damage_storage(self) -> None:
        """Of every persisted snapshot, one file is damaged."""
        storage = fsspec.filesystem("memory")
        for run, directories in found_at_place().items():
            for directory, files in directories.items():
                path = self._random.choice([each for each in files if each.endswith(NEEDED)] or files)
                how = self._random.choice(DAMAGES)
                self._world.scheduler.tell("storage", f"has {path} {how}")
                content = damaged(storage.cat_file(path), how, self._random.random())
                storage.rm_file(path) if content is None else storage.pipe_file(path, content)
                snapshot = snapshot_of(directory)
                if snapshot is not None:
                    self._world.oracle.runs.spoilt(run, (snapshot.epoch, snapshot.step))


def damaged(content: bytes, how: str, where: float) -> bytes | None:
    """What is left of a file that is damaged in one of the ways of `DAMAGES`; None: nothing, not even its name.

    Args:
        where: the place of the damage, as a fraction of the file.
    """
    bit = int(where * len(content) * 8)
    if how == "removed":
        return None
    if how == "cut off" or not content:  # what was cut off to nothing has no bit to flip
        return content[: bit // 8]
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
