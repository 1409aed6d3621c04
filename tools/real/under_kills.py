"""Runs a script as a torchrun job whose workers are killed at drawn moments, and notes the results of its ranks.

In the folder of a run, rank r writes ``losses.r``: lines of a name, a step and a number in hex, repeated for repeated
steps; and ``state.r``: lines of a name and a digest of the final state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PORT_OF_ANY = "127.0.0.1:0"
DEADLINE_S = 600.0
LONGEST = 200
"""Length in characters from which a plain value is written as a digest."""


def options(description: str) -> argparse.ArgumentParser:
    """The command-line options that all these scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="the folder of this run")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--kills", type=int, default=0, help="so many workers are killed, at moments drawn from --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", default="", help="see the script")
    parser.add_argument("--bare", action="store_true", help="without holdfast")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def launch(script: Path, asked: argparse.Namespace) -> None:
    """Run the script as workers under torchrun, and kill some. Raises `SystemExit` if the job does not end well."""
    asked.out.mkdir(parents=True, exist_ok=True)
    steps = sorted(random.Random(asked.seed).sample(range(2, asked.steps), asked.kills))
    arguments = [*sys.argv[1:], "--worker"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(asked.ranks)]
    command += ["--max-restarts", str(asked.kills), "--monitor-interval", "0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", PORT_OF_ANY, str(script), *arguments]
    with (asked.out / "log").open("wb") as log:
        job = subprocess.Popen(command, env=_environment(asked.out), stdout=log, stderr=log, start_new_session=True)
        try:
            for number, step in enumerate(steps):
                _kill_after(job, asked.out, step, number, random.Random(f"{asked.seed} {step}"))
            if job.wait(DEADLINE_S) != 0:
                raise SystemExit(f"the job ended with {job.returncode}: see {asked.out / 'log'}")
        finally:
            _end(job)


def _environment(out: Path) -> dict[str, str]:
    defaults = {"HOLDFAST_JOB": f"real-{os.getpid()}", "HOLDFAST_EVERY": "1"}
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**defaults, **os.environ, **fixed}


def _kill_after(job: subprocess.Popen[bytes], out: Path, step: int, number: int, draw: random.Random) -> None:
    """Kill a rank at some time in the step after `step`, after the job has restarted from the previous kill."""
    until = time.monotonic() + DEADLINE_S
    while _newest(out, number + 1) < step:
        if job.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"step {step} was not reached: see {out / 'log'}")
        time.sleep(0.002)
    ranks = sorted(out.glob("pid.*"))
    took_s = float((out / "took").read_text()) if (out / "took").exists() else 0.1
    time.sleep(draw.uniform(0, took_s))
    os.kill(int(draw.choice(ranks).read_text()), signal.SIGKILL)
    with (out / "kills").open("a") as file:
        print(f"after step {step}", file=file)


def _newest(out: Path, start: int) -> int:
    """The newest step that rank 0 has noted since its `start`-th start; -1 if none."""
    try:
        lines = (out / "progress.0").read_text().splitlines()
    except FileNotFoundError:
        return -1
    starts = [i for i, line in enumerate(lines) if line == "start"]
    if len(starts) < start:
        return -1
    return max((int(line) for line in lines[starts[start - 1] :] if line != "start"), default=-1)


def _end(job: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # no process is left
    job.wait()


class Notes:
    """The notes of one worker."""

    def __init__(self, out: Path) -> None:
        rank = os.environ["RANK"]
        self._losses = (out / f"losses.{rank}").open("a", buffering=1)
        self._progress = (out / f"progress.{rank}").open("a", buffering=1)
        self._state = out / f"state.{rank}"
        self._took = out / "took"
        self._last = time.monotonic()
        (out / f"pid.{rank}").write_text(str(os.getpid()))
        print("start", file=self._progress)

    def note(self, name: str, step: int, value: float) -> None:
        print(name, step, float(value).hex(), file=self._losses)

    def step(self, step: int) -> None:
        """Note that a step is completed."""
        now = time.monotonic()
        self._took.write_text(f"{now - self._last}")
        self._last = now
        print(step, file=self._progress)

    def end(self, state: Mapping[str, Any]) -> None:
        lines = [f"{path} {digest}\n" for path, digest in digests("", state)]
        unfinished = self._state.with_suffix(".unfinished")
        unfinished.write_text("".join(lines))
        unfinished.rename(self._state)


def digests(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield path and digest of each tensor and each plain value in nested dicts, lists and tuples."""
    import torch

    if isinstance(value, Mapping):
        for key in value:
            yield from digests(f"{path}.{key}".lstrip("."), value[key])
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | Sequence | torch.Tensor) for item in value):
        for i, item in enumerate(value):
            yield from digests(f"{path}.{i}", item)
    elif isinstance(value, torch.Tensor):
        part = value.to_local() if hasattr(value, "to_local") else value
        held = part.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        yield path, f"{part.dtype}{tuple(part.shape)}{hashlib.sha256(held).hexdigest()}".replace(" ", "")
    else:
        text = json.dumps(repr(value)).replace(" ", "")
        yield path, text if len(text) < LONGEST else hashlib.sha256(text.encode()).hexdigest()


def generators() -> dict[str, Any]:
    """States of the global random generators of this process."""
    import numpy
    import torch

    numbers = numpy.random.get_state(legacy=False)
    return {"torch": torch.get_rng_state(), "python": repr(random.getstate()), "numpy": repr(numbers)}
