"""Examples for other trainers, run as a user runs them: killed, restarted, and compared with an undisturbed run."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sampling import sampled

LONG_S = 120.0
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""The environment that torchrun gives to a job of one process."""


def start(example: str, job: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", f"holdfast.examples.{example}"]
    environment = os.environ | ALONE | {"HOLDFAST_JOB": job, "FOLDER": str(folder / job)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_at(process: subprocess.Popen[bytes], sign: bytes) -> None:
    """Kill the process as soon as it has printed `sign`."""
    assert process.stdout is not None
    seen = b""
    while sign not in seen:
        assert select.select([process.stdout], [], [], LONG_S)[0], seen
        piece = os.read(process.stdout.fileno(), 1 << 16)
        assert piece, seen
        seen += piece
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LONG_S)


def last_line(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, output
    return output.decode().strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("package", "example", "sign"),
    [
        pytest.param("lightning", "lightning_fit", b"epoch 1", marks=pytest.mark.slow),
        ("transformers", "huggingface_trainer", b"'loss'"),
        pytest.param("deepspeed", "deepspeed_zero", b"step 7", marks=pytest.mark.slow),  # compiles code first
        ("torch", "dcp_checkpoint", b"step 6"),
    ],
)
def test_it_goes_on_as_if_nothing_had_happened(
    arena: Path, tmp_path: Path, package: str, example: str, sign: bytes
) -> None:
    pytest.importorskip(package)
    alone = last_line(start(example, "alone", tmp_path))
    kill_at(start(example, "killed", tmp_path), sign)
    assert list(arena.glob("killed*/*.safetensors")), "nothing was kept"
    assert last_line(start(example, "killed", tmp_path)) == alone
    assert "sum of" in alone


SEED = "HOLDFAST_SEED"


def kill_after(process: subprocess.Popen[bytes], lines: int, seconds: float) -> list[str]:
    """Kill the process `seconds` after it has printed `lines` lines. Returns the whole lines that it printed."""
    assert process.stdout is not None
    seen = b""
    while seen.count(b"\n") < lines:
        assert select.select([process.stdout], [], [], LONG_S)[0], seen
        piece = os.read(process.stdout.fileno(), 1 << 16)
        assert piece, seen
        seen += piece
    time.sleep(seconds)  # the test kills at an arbitrary instant
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate(timeout=LONG_S)
    return (seen + rest).decode().rpartition("\n")[0].splitlines()


def noted(lines: list[str]) -> list[tuple[str, str]]:
    """The name and the rest of each printed line about a step or an epoch."""
    return [
        (name, rest) for name, _, rest in (line.partition(": ") for line in lines) if name[:5] in ("step ", "epoch")
    ]


@pytest.mark.needs("torch")
@sampled("kills", few=1, whole=5)
@pytest.mark.proves("plain-loader")
def test_the_loop_of_the_readme_is_exact_wherever_it_is_killed(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """A plain shuffled DataLoader with two workers, and SIGKILLs at instants drawn from a seed."""
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED}={seed}")
    drawn = random.Random(seed)
    monkeypatch.setenv("HOLDFAST_EVERY", "1")
    output, _ = start("dataloader", "alone", tmp_path).communicate(timeout=LONG_S)
    alone = output.decode().strip().splitlines()
    expected = dict(noted(alone))
    assert len(expected) == 4 * (32 + 1)
    killed: list[tuple[str, str]] = []
    for life in range(kills):
        # Few enough lines that these lives do not finish the job; some die before their first step ends. The last
        # one lives long enough to leave a snapshot.
        lines_seen = drawn.randrange(15 if life == kills - 1 else 1, 22)
        told = noted(kill_after(start("dataloader", "killed", tmp_path), lines_seen, drawn.uniform(0, 0.02)))
        killed += told
        print(f"killed after {told[-1][0]}, having begun with {told[0][0]}" if told else "killed before its first step")
    last = start("dataloader", "killed", tmp_path)
    output, _ = last.communicate(timeout=LONG_S)
    assert last.returncode == 0, output
    lines = output.decode().strip().splitlines()
    killed += noted(lines)
    assert noted(lines)[0][0] != "step 0", "nothing was restored"
    assert {name for name, _ in killed} == expected.keys()
    assert [each for each in killed if expected[each[0]] != each[1]] == []
    assert lines[-1] == alone[-1]
