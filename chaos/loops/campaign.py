"""Many seeds, on as many processes as are wanted, and what they did together."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.chaos.loops.judge import Result, TrialOutcome
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError

SEED_DEADLINE_S = 600.0
"""A seed takes less than a second, and what hangs in it has deadlines; what takes this long hangs elsewhere."""


@dataclass
class Total:
    """What many seeds did together."""

    results: list[Result] = field(default_factory=list)

    def count(self, outcome: TrialOutcome) -> int:
        """How many ended so."""
        return sum(result.outcome is outcome for result in self.results)

    @property
    def failed(self) -> list[Result]:
        """Those that are neither identical nor refused."""
        return [result for result in self.results if result.failed]

    def by_feature(self) -> dict[str, Counter[TrialOutcome]]:
        """How loops with each feature ended."""
        found: dict[str, Counter[TrialOutcome]] = {}
        for result in self.results:
            for feature in result.features:
                found.setdefault(feature, Counter())[result.outcome] += 1
        return dict(sorted(found.items()))


def run(seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    """What came of each seed, as they come, in so many processes; 1: in this one. Blocks for a seed.

    Raises:
        DeadlineExceeded: a seed hangs.
        HoldfastError: a process ended before it was told to.
    """
    if jobs <= 1:
        from holdfast.chaos.loops.trial import Trials

        with Trials() as trials:
            for seed in seeds:
                yield trials.result(seed)
        return
    workers = [_TrialProcess() for _ in range(jobs)]
    waiting = iter(seeds)
    try:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                if (first := next(waiting, None)) is not None:
                    worker.ask(first)
                    selector.register(worker.channel, selectors.EVENT_READ, worker)
            while selector.get_map():
                if not (ready := selector.select(SEED_DEADLINE_S)):
                    raise DeadlineExceeded(f"no seed ended within {SEED_DEADLINE_S:.0f} s")
                for key, _ in ready:
                    worker = key.data
                    yield worker.answer()
                    if (following := next(waiting, None)) is None:
                        selector.unregister(worker.channel)
                    else:
                        worker.ask(following)
    finally:
        for worker in workers:
            worker.close()


class _TrialProcess:
    """A process that runs one seed after another."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel.settimeout(SEED_DEADLINE_S)
        command = [sys.executable, "-m", "holdfast.chaos.loops.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        theirs.close()
        self._lines = self.channel.makefile("r")

    def ask(self, seed: int) -> None:
        self.channel.sendall(f"{seed}\n".encode())

    def answer(self) -> Result:
        line = self._lines.readline()
        if not line:
            raise HoldfastError(f"a process that runs seeds ended by itself: status {self._process.wait(1.0)}")
        return Result.parse(line)

    def close(self) -> None:
        """It ends what it has started, at the end of its seed, and then itself."""
        self._lines.close()
        self.channel.close()
        self._process.wait(SEED_DEADLINE_S)
