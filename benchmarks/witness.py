"""The cost of checking that state does not change while it is copied: ``python -m benchmarks.witness``.

Measures milliseconds on the training thread (when a step begins) and on the copy thread (when the copy ends), and their
sum as a fraction of one memcpy of the same tensors, all in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor
from holdfast.snapshot.copy.witness import WatchedPieces, Witness

ROUNDS = 31


def main() -> None:
    """Print one line of JSON for each number and size of tensors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="10000x4096,10000x65536,64x8388608", help="tensors x bytes of each")
    for case in parser.parse_args().cases.split(","):
        count, size = map(int, case.split("x"))
        print(json.dumps({"tensors": count, "bytes": size} | measure(count, size)), flush=True)


def measure(count: int, size: int) -> dict[str, float]:
    """Medians of each part over `ROUNDS`, in milliseconds, and their sum relative to a memcpy."""
    tensors: list[torch.Tensor] = [torch.nn.Parameter(torch.zeros(size // 4)) for _ in range(count)]
    slot = memoryview(bytearray(count * size))
    pieces = tuple(SlotTensor(tensor.detach(), i * size, size, str(i)) for i, tensor in enumerate(tensors))
    subjects, engine = WatchedPieces(pieces, tensors), CpuEngine()
    source, target = np.ones(count * size, np.uint8), np.ones(count * size, np.uint8)  # zeros may have no pages yet
    held: dict[str, list[float]] = {"begin_ms": [], "end_ms": [], "memcpy_ms": []}

    def note(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        held[name].append(1e3 * (time.perf_counter() - began))

    for turn in range(ROUNDS):
        note("memcpy_ms", lambda: np.copyto(target, source))
        with torch.no_grad():
            torch._foreach_add_(tensors, 1.0)  # as `optim.step()` just before a step begins
        list(map(torch.Tensor.data_ptr, tensors))  # as for the manifest
        made: list[Witness] = []
        note("begin_ms", lambda turn=turn, made=made: made.append(Witness(engine, subjects, turn)))  # type: ignore[misc]
        engine.copy(pieces, slot, lambda count: True)
        note("end_ms", lambda made=made: (made[0].look(engine), made[0].check(slot)))  # type: ignore[misc]
    medians = {name: round(statistics.median(values), 3) for name, values in held.items()}
    share = (medians["begin_ms"] + medians["end_ms"]) / medians["memcpy_ms"]
    return medians | {"of_a_memcpy": round(share, 4)}


if __name__ == "__main__":
    main()
