"""The runs of ``holdfast chaos run --seed N -- COMMAND``: undisturbed, and with faults; see `user.command`."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from holdfast.audit import Notes, read, read_last
from holdfast.chaos.faults import CATALOGUE
from holdfast.chaos.runner import Event, Runner, Wiring, release, send_signals
from holdfast.chaos.user.command import (
    IN_A_RECOVERY,
    PAUSE_S,
    STEP,
    CommandFault,
    CommandPlan,
    CommandRun,
    CommandVerdict,
    Standstill,
    draw,
    judge,
)
from holdfast.chaos.user.nodes import JOB, CommandNode
from holdfast.scratch import Scratch
from holdfast.sessions import tail
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV, read_owner

PATIENCE_S = 30.0
"""How long after a fault a command may do nothing before it is ended, as by a scheduler; see `Standstill`."""

PATIENCE_OF_SEVERAL_S = 90.0
"""The same where launchers work together, since they must first notice by silence that one is gone, and meet again; and
where other processes may be killed, such as raylets, since these must be started again."""

LOOK_EVERY_S = 0.5
END_DEADLINE_S = 10.0
SAFE_DEADLINE_S = 20.0
SIGNALS = {"kill-trainer": signal.SIGKILL, "term-trainer": signal.SIGTERM, "segv-trainer": signal.SIGSEGV}


def run(plan: CommandPlan, progress: Callable[[str], None]) -> CommandVerdict:
    """Run the command three times, and judge. Blocks; leaves nothing behind.

    Raises:
        HoldfastError: an undisturbed run failed; the message ends with what it printed.
    """
    with Scratch("chaos") as scratch:
        folder = scratch.path
        undisturbed = []
        for number, name in enumerate(("undisturbed", "undisturbed again")):
            progress(name)
            undisturbed.append(_undisturbed(plan, folder / f"run{number}", name))
        first, second = undisturbed
        if len(first) != len(second):
            raise HoldfastError(
                f"the undisturbed runs differ: {len(first)} ranks trained in the first, {len(second)} in the second"
            )
        several = plan.nodes > 1
        faults = draw(
            plan.seed, plan.faults, len(first), plan.steps, double=plan.double, other=bool(plan.other), several=several
        )
        return _Disturbed(plan, folder / "run2", faults, progress).run(first, second)


@contextmanager
def _nodes(plan: CommandPlan, folder: Path) -> Iterator[list[CommandNode]]:
    """The nodes of one run, with nothing started yet. At the end all their processes are killed and memory is freed."""
    (folder / "notes").mkdir(parents=True)
    nodes = [CommandNode(f"node{index}", folder) for index in range(plan.nodes)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.end()
        for node in nodes:
            node.power_cut()


def _undisturbed(plan: CommandPlan, folder: Path, name: str) -> list[Notes]:
    log = folder / "log"
    limit = time.monotonic() + plan.deadline_s
    with _nodes(plan, folder) as nodes:
        for node in nodes:
            node.start(plan, {})
        for node in nodes:
            status = node.wait(limit - time.monotonic())
            if status is None:
                raise DeadlineExceeded(f"the {name} run took over {plan.deadline_s:.0f} s\n{tail(log)}")
            if status:
                raise HoldfastError(f"the {name} run ended with status {status}\n{tail(log)}")
    last = read_last(folder / "notes", log, name)
    check_one_job(plan.nodes, read(folder / "notes"))
    return last


def check_one_job(nodes: int, ranks: Sequence[Sequence[Notes]]) -> None:
    """Raises `HoldfastError` if the commands on several nodes did not meet, so that each trained alone."""
    if nodes > 1 and all(len({process.pid for process in processes}) == nodes for processes in ranks):
        raise HoldfastError(
            f"the commands on the {nodes} nodes did not meet: each trained alone, as {len(ranks)} ranks. Have them "
            f"meet, such as with torchrun --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29400"
        )


class _Disturbed(Runner):
    """The run with faults: starts the command until it ends well, and injects faults at the points that it reaches."""

    def __init__(
        self, plan: CommandPlan, folder: Path, faults: Sequence[CommandFault], progress: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._faults = faults
        self._progress = progress
        self._injected: list[CommandFault] = []
        self._ranks: dict[int, int] = {}
        self._dying: set[int] = set()
        self._before: set[int] = set()
        self._lost = 0
        self._hurt = False
        self._nodes: list[CommandNode] = []
        rules = sorted({(point, None) for fault in faults for point in (fault.point, STEP)})
        self._wiring = Wiring(str(folder / "points.sock"), rules)

    def run(self, first: Sequence[Notes], second: Sequence[Notes]) -> CommandVerdict:
        """Run until the command ends well, hangs, or has failed more often than the faults can explain."""
        notes, began = self._folder / "notes", time.monotonic()
        with _nodes(self._plan, self._folder) as self._nodes:
            self.listen(self._folder / "points.sock")
            try:
                starts, hang = self._train()
                statuses = [node.status for node in self._nodes]
                leaks = self._leaks() if not any(statuses) else ()
            finally:
                self.expire(float("inf"))  # lets stopped processes go on, so that they can end
                self.hang_up()
        failure = ""
        if any(statuses) and not hang:
            said = tail(self._folder / "log")[-600:]
            failure = f"status {', '.join(map(str, statuses))} in the end: {said}"
        seen = CommandRun(
            read(notes),
            tuple(self._faults),
            tuple(self._injected),
            starts,
            hang,
            failure,
            leaks,
            time.monotonic() - began,
        )
        return judge(self._plan, first, second, seen)

    def _leaks(self) -> tuple[str, ...]:
        left = [process for node in self._nodes for process in node.processes()]
        _, alive = psutil.wait_procs(left, END_DEADLINE_S)
        return tuple(f"{process.pid} {process.name()}" for process in alive)

    # ------------------------------------------------------------------ starts and restarts

    def _train(self) -> tuple[int, bool]:
        """Start the command on every node, and again wherever it fails. Returns how often, and whether it hung."""
        most = 1 + len(self._nodes) * sum(CATALOGUE[fault.kind].ends_job for fault in self._faults)
        patience_s = PATIENCE_OF_SEVERAL_S if len(self._nodes) > 1 or self._plan.other else PATIENCE_S
        starts, limit = 0, 0.0
        while True:
            ended = [node for node in self._nodes if not node.runs]
            if idle := [node for node in ended if node.status != 0]:
                if starts == most:
                    return starts, False
                starts += 1
                self._progress("with faults" if starts == 1 else f"started again ({starts - 1})")
                limit, standstill = time.monotonic() + self._plan.deadline_s, Standstill(patience_s, self._work_s)
                for node in idle:
                    node.end()
                    node.start(self._plan, self._wiring.environment("job"))
                    self.wake_at_end(node.pid)
            elif len(ended) == len(self._nodes):
                return starts, False
            self.turn(time.monotonic() + LOOK_EVERY_S)
            now = time.monotonic()
            if now > limit:
                return starts, True
            trained = sum(file.stat().st_size for file in (self._folder / "notes").iterdir())
            if self._hurt and standstill.lasts(trained, (self._folder / "log").stat().st_size, now):
                self._progress("the command neither ends nor trains: ending it")
                for node in self._nodes:
                    node.end()

    def _work_s(self) -> float:
        """How much processor time the processes of the command have taken, in seconds."""
        total = 0.0
        for process in (process for node in self._nodes for process in node.processes()):
            with suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def heard(self, event: Event, sock: socket.socket) -> None:
        """Inject the fault that is due where a process has reached a point, and let the process go on."""
        if not psutil.pid_exists(event["pid"]):
            return  # it was killed on its way, or while it waited here
        node, due = self._node_of(event["pid"]), self._next(event["pid"])
        if node and due and due.matches(self._rank_of(event["pid"]), event["point"], event["step"]):
            self._progress(f"{due.kind} at {event['point']} of step {event['step']}, rank {due.rank}, {node.name}")
            self._inject(due, event["pid"], node)
            self._injected.append(due)
            self._hurt |= CATALOGUE[due.kind].ends_job
        release(sock)

    def _next(self, pid: int) -> CommandFault | None:
        """The next fault, if it may strike at a point of process `pid`.

        A dying process gets none, and a fault in a recovery needs a process that was started for that recovery.
        """
        left = self._faults[len(self._injected) :]
        if not left or pid in self._dying:
            return None
        return None if left[0].point in IN_A_RECOVERY and pid in self._before else left[0]

    def _inject(self, fault: CommandFault, pid: int, node: CommandNode) -> None:
        """Inject a fault. `pid`: the process that has reached the point, on `node`."""
        if CATALOGUE[fault.kind].ends_job:
            self._before = self._trainers(pid)
        match fault.kind:
            case "kill-trainer" | "term-trainer" | "segv-trainer":
                self._dying.add(pid)  # it takes a moment to die, and may reach another point meanwhile
                send_signals(pid, SIGNALS[fault.kind])
            case "kill-trainers":
                for process in self._trainers(pid):
                    send_signals(process, signal.SIGKILL)
            case "kill-launcher":
                node.kill()  # trainers that it leaves behind are in `_before`, so they count for no recovery
            case "pause-trainer":
                self._pause(pid)
            case "kill-smp":
                send_signals(node.smp(), signal.SIGKILL)
            case "pause-smp":
                self._pause(node.smp())
            case "lose-node":
                self._lose(node)
            case "kill-other":
                for other in self._others():
                    send_signals(other, signal.SIGKILL)

    def _trainers(self, pid: int) -> set[int]:
        newest = [processes[-1] for processes in read(self._folder / "notes") if processes]
        return {pid, *(notes.pid for notes in newest)}

    def _node_of(self, pid: int) -> CommandNode | None:
        """The node on which a process runs, while its command runs there; None if it has ended or has another arena."""
        with suppress(psutil.Error):
            memory = psutil.Process(pid).environ().get(ARENA_ENV)
            return next((node for node in self._nodes if node.runs and str(node.memory) == memory), None)
        return None

    def _lose(self, node: CommandNode) -> None:
        """Wait until a snapshot tolerates the loss of a node, cut the node's power, and put a spare in its place.

        Raises:
            HoldfastError: no snapshot tolerates the loss of a node within `SAFE_DEADLINE_S`.
        """
        owner = read_owner(node.arena)
        limit = time.monotonic() + SAFE_DEADLINE_S
        while owner is not None:
            overview = look(JOB, owner.control)
            if overview.safest is not None and overview.safest.tolerates > 0 and not overview.silent:
                break
            if time.monotonic() > limit:
                raise HoldfastError(
                    f"no snapshot tolerates the loss of a node after {SAFE_DEADLINE_S:.0f} s: {overview.sentence()}"
                )
            time.sleep(LOOK_EVERY_S)
        node.power_cut()
        self._lost += 1
        spare = CommandNode(f"node{len(self._nodes) + self._lost - 1}", self._folder)
        self._nodes[self._nodes.index(node)] = spare

    def _others(self) -> list[int]:
        """Pids of processes with the plan's word in their command lines. Raises `HoldfastError` if there are none."""
        word, found = self._plan.other, []
        for process in (process for node in self._nodes for process in node.processes()):
            with suppress(psutil.Error):  # it has just ended
                if any(word in part for part in process.cmdline()):
                    found.append(process.pid)
        if not found:
            raise HoldfastError(f"no process of the command has {word!r} in its command line")
        return found

    def _rank_of(self, pid: int) -> int | None:
        """The rank of a process, from its environment or from its notes; None if neither has it yet."""
        if pid not in self._ranks:
            rank = _rank_in_environment(pid)
            if rank is not None:
                self._ranks[pid] = rank
            for noted, processes in enumerate(read(self._folder / "notes")):
                self._ranks |= {notes.pid: noted for notes in processes}
        return self._ranks.get(pid)

    def _pause(self, pid: int) -> None:
        send_signals(pid, signal.SIGSTOP)
        self.later(PAUSE_S, lambda: send_signals(pid, signal.SIGCONT))


def _rank_in_environment(pid: int) -> int | None:
    try:
        environment = psutil.Process(pid).environ()
    except psutil.Error:
        return None
    said = [environment.get(name, "") for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")]
    return next((int(rank) for rank in said if rank.isdigit()), None)
