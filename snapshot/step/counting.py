"""Loops that count their own batches. ``enumerate(snap.data(loader))`` begins at 0 again when a restart goes on in the
middle of a pass, so a step at every fourth batch, or a schedule by that number, would be another one.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

from holdfast.smp_daemon.shared.logs import get_log

PASSES_ON = ("tqdm", "rich.")
"""Modules whose generators pass on what they read: progress bars."""

FIX = "write `for i, batch in snap.data(loader).enumerate():`, which goes on counting"

log = get_log(__name__)


class Counting:
    """Used by the training thread.

    Attributes:
        leaves: whether some pass, in this process or an earlier one, has ended with gradients that no step used; None:
            no pass has ended yet.
    """

    def __init__(self, leaves: bool | None) -> None:
        self.leaves = leaves
        self._begins_anew: bool | None = None

    def batch(self, knows: bool, speaks: bool) -> None:
        """A batch is about to be given; called in its source's generator. Looks at the first one only.

        Args:
            knows: whether the loop has asked where in the pass it begins.
            speaks: whether this rank warns.
        """
        if self._begins_anew is None:
            self._begins_anew = not knows and is_counted_anew(sys._getframe())
            if self._begins_anew and speaks:
                log.warning(
                    "this loop numbers its batches by enumerate(), which begins at 0 again when a restart goes on in "
                    "the middle of a pass. If a step, a schedule or an evaluation follows from the number, %s",
                    FIX,
                )

    def pass_over(self, resumed: bool, unused: bool) -> str:
        """The only source of batches has come to the end of a pass. Returns why the restart has gone wrong; empty if
        it has not: the pass was resumed, and leaves gradients as none before the restart did.

        Args:
            resumed: whether the pass went on in its middle after a restart.
            unused: whether gradients were computed that no step has used.
        """
        before, self.leaves = self.leaves, bool(self.leaves) or unused
        if not (unused and resumed) or before:
            return ""
        text = (
            "a pass that went on in its middle after a restart ends with gradients that no step has used, as if "
            f"its batches were counted from 0 again: {FIX}"
        )
        if before is None and not self._begins_anew:
            log.warning("%s", text)  # perhaps all passes end so, and the next one uses them
            return ""
        return text


def is_counted_anew(frame: FrameType | None) -> bool:
    """Whether the loop that reads the source whose generator has called this function counts its batches by the
    built-in ``enumerate``, from 0 or 1, perhaps through a progress bar. Looks at all objects of the process once."""
    frames: set[FrameType] = set()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("holdfast.", *PASSES_ON)):
            break
        frames.add(frame)
        frame = frame.f_back
    for each in gc.get_objects():
        if type(each) is enumerate:
            counted: Any = each.__reduce__()
            source, number = counted[1]
            if number in (0, 1) and getattr(source, "gi_frame", None) in frames:
                return True
    return False
