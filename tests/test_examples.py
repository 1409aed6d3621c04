"""Examples for other trainers, as a user runs them: killed, started again, and compared with a run left alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_hook import arena as arena

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
"""What torchrun would say to a job of one process."""


def start(example: str, job: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", f"examples.{example}"]
    environment = os.environ | ALONE | {"HOLDFAST_JOB": job, "HOLDFAST_FOLDER": str(folder / job)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_at(process: subprocess.Popen[bytes], sign: bytes) -> None:
    """Kill it as soon as it has printed `sign`."""
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
        pytest.param("deepspeed", "deepspeed_zero", b"step 7", marks=pytest.mark.slow),  # compiles first
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
    assert "steps; sum of all weights" in alone
