"""``python benchmarks/device.py``: what copies from a CUDA device into a slot cost. Needs a GPU, else exits with 2.

* Rate: `CudaEngine.copy` and `finish` against one ``copy_`` of the same bytes into pinned memory, in turns.
* Inflation: the time of a training step of bf16 transformer blocks with a copy of the whole state every step, against
  the same step without, in turns. Every figure is the median over rounds of a ratio within one round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from holdfast.snapshot.copy.cuda import CudaEngine
from holdfast.snapshot.copy.cuda_runtime import TorchRuntime
from holdfast.snapshot.copy.engines import SlotTensor

DEADLINE_S = 60.0


class Refusing(TorchRuntime):
    """CUDA that registers no memory, so that copies go through the pinned ring."""

    def register(self, address: int, count: int) -> int:
        return 2


def place(tensors: Sequence[torch.Tensor]) -> tuple[list[SlotTensor], memoryview]:
    """Pieces one after another, each on 64 bytes, and a slot of shared memory that holds them."""
    pieces = []
    at = 0
    for tensor in tensors:
        pieces.append(SlotTensor(tensor, at, tensor.nbytes))
        at += -(-tensor.nbytes // 64) * 64
    mapping = mmap.mmap(-1, at, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return pieces, memoryview(mapping)


def no_pause(count: int) -> None:
    """Copies are not paced."""


def timed(work: Callable[[], object]) -> float:
    """Seconds until `work` is done, on the device too."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def rate(runtime: TorchRuntime, total_bytes: int, tensors: int, rounds: int) -> dict[str, float]:
    """GB/s of the copy engine and of one pinned copy, and their ratio."""
    flat = torch.randint(0, 256, (total_bytes,), dtype=torch.uint8, device=runtime.device)
    pinned = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=True)
    pieces, slot = place(flat.chunk(tensors))
    engine = CudaEngine(runtime)

    def move() -> None:
        engine.mark()
        engine.copy(pieces, slot, no_pause)
        engine.fence()
        engine.finish()

    first_s = timed(move)  # registers the slot
    host = torch.frombuffer(slot, dtype=torch.uint8)
    if not all(torch.equal(host[p.offset : p.offset + p.bytes], p.tensor.cpu()) for p in pieces):
        raise SystemExit("the slot is not what was on the device")
    timed(lambda: pinned.copy_(flat, non_blocking=True))
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(timed(move))
        theirs.append(timed(lambda: pinned.copy_(flat, non_blocking=True)))
    engine.close()
    return {
        "engine_gbps": total_bytes / statistics.median(mine) / 1e9,
        "pinned_gbps": total_bytes / statistics.median(theirs) / 1e9,
        "ratio": statistics.median(b / a for a, b in zip(mine, theirs, strict=True)),
        "first_s": first_s,
    }


class Training:
    """bf16 transformer blocks with AdamW, and a copy engine that copies all of it beside the next step."""

    def __init__(self, runtime: TorchRuntime, layers: int, width: int, batch: int, length: int) -> None:
        torch.manual_seed(1)
        kind = torch.nn.TransformerEncoderLayer
        blocks = [
            kind(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
        ]
        self.model = torch.nn.Sequential(*blocks).to(runtime.device, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.input = torch.randn(batch, length, width, device=runtime.device, dtype=torch.bfloat16)
        self.engine = CudaEngine(runtime)
        self.thread = ThreadPoolExecutor(1, "copy")
        self.steps(1, copies=False)
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        self.pieces, self.slot = place([*(p.detach() for p in self.model.parameters()), *moments])

    @property
    def bytes(self) -> int:
        """Of the state that is copied."""
        return sum(piece.bytes for piece in self.pieces)

    def steps(self, count: int, copies: bool) -> None:
        """Train; with `copies`, every step's state is copied while the next runs, and finished before the one after."""
        queued = finished = None
        for _ in range(count):
            self.model(self.input).square().mean().backward()
            if queued is not None:
                queued.result(DEADLINE_S)
                self.engine.fence()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if copies:
                self.engine.mark()
                queued = self.thread.submit(self.engine.copy, self.pieces, self.slot, no_pause)
                finished = self.thread.submit(self.engine.finish)
        if finished is not None:
            finished.result(DEADLINE_S)

    def close(self) -> None:
        """End the copy thread and let go of the slot."""
        self.thread.shutdown()
        self.engine.close()


def inflation(training: Training, steps: int, rounds: int) -> dict[str, float]:
    """Seconds of a step without and with copies, and their ratio."""
    for copies in (False, True):
        training.steps(3, copies)
    plain, copied = [], []
    for _ in range(rounds):
        plain.append(timed(lambda: training.steps(steps, copies=False)) / steps)
        copied.append(timed(lambda: training.steps(steps, copies=True)) / steps)
    return {
        "state_gb": training.bytes / 1e9,
        "step_s": statistics.median(plain),
        "step_with_copy_s": statistics.median(copied),
        "ratio": statistics.median(b / a for a, b in zip(plain, copied, strict=True)),
    }


def machine() -> str:
    """What this was measured on."""
    cores = len(os.sched_getaffinity(0))
    return f"{torch.cuda.get_device_name()}, {cores} cores, torch {torch.__version__}, CUDA {torch.version.cuda}"


def table(date: str, results: dict[str, dict[str, float]]) -> str:
    """The results as a Markdown table."""
    lines = [f"{date}, {machine()}", "", "| | with a copy engine | without | ratio |", "|---|---|---|---|"]
    for name in ("registered", "ring"):
        row = results[name]
        lines.append(
            f"| copy, {name} (first: {row['first_s']:.2f} s) | {row['engine_gbps']:.1f} GB/s "
            f"| {row['pinned_gbps']:.1f} GB/s (one pinned copy) | {row['ratio']:.2f} |"
        )
    row = results["step"]
    lines.append(
        f"| step, {row['state_gb']:.1f} GB copied every step | {row['step_with_copy_s'] * 1e3:.1f} ms "
        f"| {row['step_s'] * 1e3:.1f} ms | {row['ratio']:.3f} |"
    )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Cost of copies from a CUDA device into a slot")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state whose rate is measured")
    parser.add_argument("--tensors", type=int, default=200, help="how many tensors it has")
    parser.add_argument("--layers", type=int, default=12, help="transformer blocks")
    parser.add_argument("--width", type=int, default=2048, help="their width, a multiple of 64")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="of a sequence")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/device.py needs a CUDA device: torch.cuda.is_available() is false", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    total = int(options.gib * 2**30)
    training = Training(TorchRuntime(device), options.layers, options.width, options.batch, options.length)
    results = {"step": inflation(training, options.steps, options.rounds)}
    training.close()
    results["registered"] = rate(TorchRuntime(device), total, options.tensors, options.rounds)
    results["ring"] = rate(Refusing(device), total, options.tensors, options.rounds)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(table(date, results))
    if options.json:
        options.json.write_text(json.dumps({"date": date, "machine": machine(), **results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
