"""Who owns a slot of a shard: its trainer, the SMP, or nobody. The name of an empty file beside the slot says it:
``<slot file>.<owner>.<epoch>.own``.

=====================  ============================================================================================
owner                  who may write into the slot, and who may take it
=====================  ============================================================================================
``free``               nobody writes; the trainer and the SMP may take it
``taken-<n>``          the trainer writes, until it hands the slot over to be sealed; the SMP may not take it
``busy``               the SMP writes, or digests what the trainer has handed over; the trainer may not take it
``sealed-<e>-<s>``     nobody writes; it holds that snapshot, and the trainer takes it once the job keeps it no more
``held-<e>-<s>``       as sealed, but not to be taken: the SMP persists the snapshot, or repairs a unit in place
=====================  ============================================================================================

Every change of owner is one rename of that file. It succeeds for one process only, whoever else tries; whoever is
killed, at any instruction, leaves the owner before it or the one after it; and nobody waits. So a trainer that takes a
slot needs no answer from an SMP, and an SMP that is dead or stopped does not hold it up.

A commit record counts only while its slot is marked as sealed with the same snapshot. So taking a slot undoes the seal
of what is in it before its first byte changes.

An epoch ends for a slot as the SMP renames its mark into the next epoch. A process of an older epoch, wherever it was
stopped, then finds no mark of its epoch and can take nothing; a slot that it had taken is deleted, and made again.

Order. What is written into a slot after a rename, or read from it before a failed look at its mark, is seen in that
order on Arm as on x86: the kernel's locks and the interpreter's lock, which a thread gives back and takes again around
each system call, are a release and then an acquire. A reader that finds bytes which do not match their digest therefore
also finds that the slot was taken, if that was the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from holdfast.smp_daemon.shared.layout import SnapshotId

FREE, BUSY = "free", "busy"

_MARK = re.compile(r"(.+)\.(free|busy|taken-\d+|(?:sealed|held)-\d+-\d+)\.(\d+)\.own")
_HOLDS = re.compile(r"(?:sealed|held)-(\d+)-(\d+)")


def taken(number: int) -> str:
    """The trainer's; `number` tells it from every other time that it took the slot in this epoch."""
    return f"taken-{number}"


def is_taken(owner: str) -> bool:
    """Whether it is the trainer's."""
    return owner.startswith("taken-")


def sealed(snapshot: SnapshotId) -> str:
    """Nobody's: it holds a snapshot."""
    return f"sealed-{snapshot.epoch}-{snapshot.step}"


def held(snapshot: SnapshotId) -> str:
    """The SMP's: it holds a snapshot, and may not be taken."""
    return f"held-{snapshot.epoch}-{snapshot.step}"


def snapshot_in(owner: str) -> SnapshotId | None:
    """The snapshot that a slot of that owner holds; None if it holds none."""
    found = _HOLDS.fullmatch(owner)
    return None if found is None else SnapshotId(int(found[1]), int(found[2]))


def in_words(owners: Iterable[str]) -> str:
    """What slots of these owners hold."""
    return ", ".join(sorted(str(snapshot_in(owner) or owner) for owner in owners)) or "there is none yet"


def choices(
    marks: Mapping[str, str], keep: Collection[SnapshotId], given_back: Collection[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """The slots that a trainer may take, with their owners, the best first: free ones, and those that it has given
    back, before any that holds a snapshot. Pure.

    Args:
        marks: the owner of each slot.
        keep: the snapshots that must stay.
        given_back: marks of slots that the trainer has taken and does not need.
    """
    free = [(file, owner) for file, owner in sorted(marks.items()) if owner == FREE or (file, owner) in given_back]
    full = [(snapshot, file) for file, owner in marks.items() if (snapshot := snapshot_in(owner)) is not None]
    old = [(file, sealed(snapshot)) for snapshot, file in sorted(full) if snapshot not in keep]
    return free + [(file, owner) for file, owner in old if marks[file] == owner]


class Owners:
    """The marks in one arena. Thread-safe.

    Attributes:
        epoch: whose marks are read and changed; None: no trainer can be there yet, and none are made.
    """

    def __init__(self, arena: Path, epoch: int | None = None) -> None:
        self._arena = arena
        self.epoch = epoch

    def _path(self, file: str, owner: str, epoch: int | None) -> Path:
        return self._arena / f"{file}.{owner}.{epoch}.own"

    def has(self, file: str, owner: str) -> bool:
        """Whether `owner` owns the slot."""
        return self._path(file, owner, self.epoch).exists()

    def create(self, file: str, owner: str) -> None:
        """Mark a slot that has no owner."""
        self._path(file, owner, self.epoch).touch()

    def change(self, file: str, old: str, new: str, *, since: int | None = None) -> bool:
        """Give a slot from one owner to another. Returns False if it is not the old one's any more.

        Args:
            since: the epoch of the old mark, if it is another.
        """
        return _renamed(
            self._path(file, old, self.epoch if since is None else since), self._path(file, new, self.epoch)
        )

    def renew(self, file: str, owner: str, epoch: int) -> bool:
        """Carry a slot's mark into a newer epoch. Returns False if it is another owner's."""
        if self.epoch is None:
            self._path(file, owner, epoch).touch()
            return True
        return _renamed(self._path(file, owner, self.epoch), self._path(file, owner, epoch))

    def clear(self, file: str) -> None:
        """Remove all marks of a slot, which has been deleted."""
        for owner, epoch in self.found().get(file, ()):
            self._path(file, owner, epoch).unlink(missing_ok=True)

    def found(self) -> dict[str, list[tuple[str, int]]]:
        """The owner of each slot, with the epoch of the mark. A slot whose mark changes meanwhile may be there twice,
        or be missing."""
        marks = dict[str, list[tuple[str, int]]]()
        for path in self._arena.glob("*.own"):
            if (mark := _MARK.fullmatch(path.name)) is not None:
                marks.setdefault(mark[1], []).append((mark[2], int(mark[3])))
        return marks


def _renamed(before: Path, after: Path) -> bool:
    """Rename a mark. Returns False if it is not there any more."""
    try:
        before.replace(after)
    except FileNotFoundError:
        return False
    return True
