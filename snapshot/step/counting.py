"""Loops that count their own batches. ``enumerate(snap.data(loader))`` begins at 0 again when a restart goes on in the
middle of a pass, so a step at every fourth batch would be another one. `snapshot.step.carried` finds that in the source
of the script; where there is none, a pass that ends otherwise than before tells.
"""

from __future__ import annotations

from holdfast.smp_daemon.shared.logs import get_log

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
        if before is None:
            log.warning("%s", text)  # perhaps all passes end so, and the next one uses them
            return ""
        return text
