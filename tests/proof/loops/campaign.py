"""Runs many seeds, on one or several processes, and counts the outcomes."""

from __future__ import annotations

import selectors
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.processes import own_command, own_environment
from tests.proof.loops.judge import Result, TrialOutcome

SEED_DEADLINE_S = 600.0
"""Timeout for the next result, in seconds. A seed takes less than 1 s, and its lives have timeouts of their own."""


@dataclass
class Total:
    """The results of many seeds."""

    results: list[Result] = field(default_factory=list)

    def count(self, outcome: TrialOutcome) -> int:
        """The number of seeds with this outcome."""
        return sum(result.outcome is outcome for result in self.results)

    @property
    def failed(self) -> list[Result]:
        """The results that are neither identical nor refused."""
        return [result for result in self.results if result.failed]

    def by_feature(self) -> dict[str, Counter[TrialOutcome]]:
        """The number of loops with each feature, by outcome."""
        found: dict[str, Counter[TrialOutcome]] = {}
        for result in self.results:
            for feature in result.features:
                found.setdefault(feature, Counter())[result.outcome] += 1
        return dict(sorted(found.items()))


def run(seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    """Run seeds in `jobs` processes, or in this one if that is 1, and yield each result as it arrives. Blocks.

    Raises:
        DeadlineExceeded: no seed ended in time.
        HoldfastError: a worker process ended unexpectedly.
    """
    if jobs <= 1:
        from tests.proof.loops.trial import Trials

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
    except DeadlineExceeded:
        for worker in workers:
            worker.kill()  # else `close` would wait as long again for each that hangs, and fail
        raise
    finally:
        for worker in workers:
            worker.close()


class _TrialProcess:
    """A process that runs one seed after another."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel.settimeout(SEED_DEADLINE_S)
        command = own_command("tests.proof.loops.worker", str(theirs.fileno()))
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=own_environment() | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._lines = self.channel.makefile("r")

    def ask(self, seed: int) -> None:
        self.channel.sendall(f"{seed}\n".encode())

    def answer(self) -> Result:
        line = self._lines.readline()
        if not line:
            raise HoldfastError(f"a worker process of `loops` ended unexpectedly: status {self._process.wait(1.0)}")
        return Result.parse(line)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Close the channel, and wait until the process has finished its seed and ended."""
        self._lines.close()
        self.channel.close()
        self._process.wait(SEED_DEADLINE_S)
