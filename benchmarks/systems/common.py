"""Code shared by the compared systems: the state to save, waiting, memory accounting, and folders of saves on tmpfs."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

DEADLINE_S = 120.0
"""Timeout for every wait of a measurement."""

State = dict[str, dict[str, torch.Tensor]]


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """All live tensors of the training state: ``{"model": {name: tensor}, "optim": {name: tensor}}``."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moments = {
        f"{name}.{kind}": tensor
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state[parameter].items()
    }
    return {"model": parameters, "optim": moments}


def copy_into(live: State, saved: State) -> None:
    """Write a loaded state into the live tensors of the same names."""
    with torch.no_grad():
        for part, tensors in live.items():
            for name, tensor in tensors.items():
                tensor.copy_(saved[part][name])


def buffered(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a part of one already mapped host buffer and a tensor's bytes; pinned if tensors are on a GPU."""
    sources = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    lengths = [source.numel() for source in sources]
    buffer = torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=any(source.is_cuda for source in sources))
    return list(zip(torch.split(buffer.fill_(1), lengths), sources, strict=True))


def settle(device: torch.device) -> None:
    """Block until a GPU has completed all queued work; no-op for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def until(condition: Callable[[], bool], what: str, *, pause_s: float = 0.001) -> None:
    """Poll a condition until it holds.

    Raises:
        TimeoutError: it did not hold within `DEADLINE_S`.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took more than {DEADLINE_S:.0f} s")
        time.sleep(pause_s)


def release_heap() -> None:
    """Return freed memory to the kernel, so that it does not count as in use."""
    ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """Memory in use beyond that at the time this object was made, and processor time.

    Counts the proportional set sizes of this process, of `roots` and of all their descendants, and the blocks of
    `files`, which are on tmpfs. Mappings of `files` are not counted a second time.

    Args:
        others: files that another rank counts; their mappings are left out too.
    """

    def __init__(
        self,
        files: Callable[[], Iterable[Path]],
        roots: Callable[[], Iterable[int]] = tuple,
        others: Callable[[], Iterable[Path]] = tuple,
    ) -> None:
        self._files = files
        self._roots = roots
        self._others = others
        self._before = 0
        release_heap()
        self._before = self.extra_bytes()

    def extra_bytes(self) -> int:
        blocks = {}
        for path in self._files():
            try:
                blocks[str(path)] = path.stat().st_blocks * 512
            except FileNotFoundError:
                continue  # deleted since it was listed
        processes = _descendants({os.getpid(), *self._roots()})
        mapped = {*blocks, *map(str, self._others())}
        return sum(_pss(pid, mapped) for pid in processes) + sum(blocks.values()) - self._before

    def processor_s(self) -> float:
        """Processor time so far, in seconds, of this process, of `roots` and of all their descendants; precise for this
        process, to a tick of 10 ms for the others."""
        children = os.times()
        own_s = time.process_time() + children.children_user + children.children_system
        others = _descendants({os.getpid(), *self._roots()}) - {os.getpid()}
        return own_s + sum(map(_processor_s, others))


def _processor_s(pid: int) -> float:
    """Processor time of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # ended since it was listed
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def files_below(root: Path) -> list[Path]:
    """All files of a directory tree, which may change during the call."""
    return [Path(folder) / name for folder, _, names in os.walk(root) for name in names]


def _descendants(roots: set[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended since it was listed
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def _pss(pid: int, without: Iterable[str]) -> int:
    """The proportional set size of a process in bytes, without its mappings of the files `without`."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # ended since it was listed
    total = 0
    path = ""
    for line in lines:
        key, *rest = line.split(maxsplit=5)
        if not key.endswith(":"):
            path = rest[4] if len(rest) > 4 else ""
        elif key == "Pss:" and path not in without:
            total += int(rest[0]) * 1024
    return total


class Folders:
    """One folder per save, below one on tmpfs, as users of file-based checkpoints keep them.

    Keeps the newest finished save and the one in progress. Rank 0 deletes older saves in a thread, to disturb training
    as little as possible.
    """

    def __init__(self, root: Path, rank: int) -> None:
        self._root = root
        self._rank = rank
        self._deleter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delete")
        self._deletions: list[Future[None]] = []
        self._current: Path | None = None
        self._newest: Path | None = None

    @property
    def newest(self) -> Path:
        """The newest finished save."""
        if self._newest is None:
            raise RuntimeError("nothing was saved yet")
        return self._newest

    def path(self, step: int) -> Path:
        """The folder for the save of a step."""
        return self._root / f"step-{step}"

    def begin(self, step: int) -> Path:
        """Mark the save of a step as in progress; return its folder."""
        self._current = self.path(step)
        return self._current

    def finish(self) -> None:
        """Mark the current save as complete on all ranks."""
        old, self._newest, self._current = self._newest, self._current, None
        if old is not None and self._rank == 0:
            self._deletions.append(self._deleter.submit(shutil.rmtree, old))

    def idle(self) -> bool:
        """Whether nothing is being saved or deleted.

        Raises:
            OSError: a save could not be deleted.
        """
        while self._deletions and self._deletions[0].done():
            self._deletions.pop(0).result()
        return self._current is None and not self._deletions

    @property
    def saving(self) -> bool:
        return self._current is not None

    def files(self) -> list[Path]:
        """The files of all saves, for rank 0 to count; none on other ranks."""
        return files_below(self._root) if self._rank == 0 else []

    def close(self) -> None:
        self._deleter.shutdown()
        for deletion in self._deletions:
            deletion.result()


class FolderSystem:
    """Base of systems that save each time into a new folder; `poll` notices that a save is complete."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._folders = Folders(folder, rank)
        self._memory = Memory(self._folders.files)

    def accepted(self) -> bool:
        return True

    def before_step(self) -> None: ...

    def poll(self) -> None: ...

    def survives_kill(self) -> bool:
        self.poll()
        return not self._folders.saving

    def done(self) -> bool:
        self.poll()
        return self._folders.idle()

    def wait(self) -> None:
        until(self.done, "a save")

    def extra_bytes(self) -> int:
        return self._memory.extra_bytes()

    def processor_s(self) -> float:
        return self._memory.processor_s()

    def close(self) -> None:
        self.wait()
        self._folders.close()
