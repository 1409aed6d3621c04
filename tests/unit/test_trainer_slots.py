"""The slots of a shard as its trainer takes them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.messages import SlotFile
from holdfast.smp_daemon.shared.owners import FREE, Owners
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.shared.trainer_slots import TrainerSlots

EPOCH, FILE, BYTES = 1, "dp0.0.slot", 4096


class Crowded(System):
    """A machine that maps nothing more for now."""

    is_full = False

    def map(self, *arguments: Any, **options: Any) -> Any:
        if self.is_full:
            raise OSError(errno.ENOMEM, "no memory")
        return super().map(*arguments, **options)


def test_a_slot_that_could_not_be_mapped_is_taken_the_next_time(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(bytes(BYTES))
    Owners(tmp_path, EPOCH).create(FILE, FREE)
    system = Crowded()
    slots = TrainerSlots(tmp_path, system)
    slots.enter(EPOCH)
    slots.learn(EPOCH, "dp0", [SlotFile(file=FILE, inode=(tmp_path / FILE).stat().st_ino, bytes=BYTES)])
    slots.forget()
    system.is_full = True
    with pytest.raises(ProtocolError):
        slots.take(EPOCH, "dp0", (), bool)
    system.is_full = False
    assert slots.take(EPOCH, "dp0", (), bool).file == FILE
