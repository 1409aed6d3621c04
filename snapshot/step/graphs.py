"""When the listener hears of what a loop does: at once, outside of torch.func's transforms, or as a CUDA graph replays.

What a loop does while a CUDA graph is captured happens again at each replay, and calls no hook then.

Nothing is computed during a capture, so nothing is reported then. The reports are kept with the graph, and made at each
of its replays: those from before an optimizer changes the state, before the replay is queued; the others after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.cuda_runtime import uses_cuda
from holdfast.snapshot.step.hooks import replaced

UNHEARD = 64
"""After this many replays of unknown graphs without any optimizer stepping, a warning says that they may step one."""

log = get_log(__name__)

Say = Callable[[], None]


def capturing() -> bool:
    """Whether what this thread queues is being recorded into a graph."""
    return uses_cuda() and torch.cuda.is_current_stream_capturing()


def kind_of_graph() -> Any:
    """The class whose ``capture_begin``, ``capture_end`` and ``replay`` are wrapped."""
    return torch.cuda.CUDAGraph


@dataclass(slots=True)
class _Tape:
    """What to report before a replay is queued, and after."""

    before: list[Say] = field(default_factory=list)
    after: list[Say] = field(default_factory=list)


class Graphs:
    """Listens to all captures and replays of this process, until `remove`. Used by the training thread."""

    def __init__(self) -> None:
        self._tapes: weakref.WeakKeyDictionary[Any, _Tape] = weakref.WeakKeyDictionary()
        self._tape = _Tape()
        self._unheard = 0
        kind = kind_of_graph()
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._tape = _Tape()
            return begin(graph, *args, **kwargs)

        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._tapes[graph] = self._tape
            return end(graph, *args, **kwargs)

        def replayed(graph: Any, *args: Any, **kwargs: Any) -> Any:
            tape = self._tapes.get(graph)
            if tape is None:
                self._count_unknown()
                return replay(graph, *args, **kwargs)
            for say in tape.before:
                say()
            result = replay(graph, *args, **kwargs)
            for say in tape.after:
                say()
            return result

        methods = {"capture_begin": capture_begin, "capture_end": capture_end, "replay": replayed}
        self._undo = [replaced(kind, name, method) for name, method in methods.items()]

    def say(self, what: Say, *, after: bool = False) -> None:
        """Call `what` now; during a capture, call it at each replay instead, before it or `after`."""
        if not capturing():
            with temporarily_clear_interpreter_stack():  # a transform of torch.func would wrap every tensor made in it
                what()
        elif after:
            self._tape.after.append(what)
        else:
            self._tape.before.append(what)

    def heard(self) -> None:
        """An optimizer has stepped."""
        self._unheard = 0

    def remove(self) -> None:
        """Unwrap the methods."""
        while self._undo:
            self._undo.pop()()

    def _count_unknown(self) -> None:
        self._unheard += 1
        if self._unheard == UNHEARD:
            log.warning(
                "CUDA graphs that were captured before the hook was entered have been replayed %d times, and no "
                "optimizer has stepped. A step inside one of them is not noticed, and no snapshot is taken: capture it "
                "inside `with InMemorySnapshot(...)`",
                UNHEARD,
            )
