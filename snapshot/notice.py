"""What a trainer is told by signals: its node is to be taken away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.settings import LEAVE_ON

log = get_log(__name__)


class Notice:
    """Hears such signals until `withdraw`. A signal that comes a second time does what it did before.

    Attributes:
        given: whether one has come.

    Raises:
        ConfigError: there are signals to hear, and this is not the main thread, which alone may.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(f"{LEAVE_ON.variable} needs a hook that is entered in the main thread: enter it there")
        self.given = False
        self._before: dict[int, Any] = {number: signal.signal(number, self._hear) for number in signals}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.given = True
        self._put_back(number)
        log.warning("%s: the job ends at a boundary, as this node is to be taken away", signal.Signals(number).name)

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._hear:  # somebody may have set another one meanwhile
            signal.signal(number, self._before[number] or signal.SIG_DFL)

    def withdraw(self) -> None:
        """Hear nothing more. May be repeated, in the main thread only."""
        for number in self._before:
            self._put_back(number)
