"""The arena: one SMP's directory of slot files on tmpfs, with all pools and the layouts that say what they hold.

::

    <arena>/                  0700, locked (`flock` on the directory) by the SMP that owns it
      smp.json                who owns it: pid, addresses
      node.json               newest epoch seen, newest snapshot protected job-wide; without it no slot counts
      reserve                 holds memory that slots may still take, if there is a limit (`smp_daemon.shared.budget`)
      layout-<epoch>-<revision>.json     the job's layout in that epoch; each regrouping adds a revision
      board                   outcomes of recent snapshots; mapped by the trainers (`smp_daemon.shared.board`)
      <coord>.<i>.safetensors     a shard's slot i, and its commit record <same>.json
      <same>.<owner>.<epoch>.own  who owns that slot (`smp_daemon.shared.owners`)
      <tag>-<p>.<i>.parity        parity slot i of position p in the group with that tag, and its commit record
      gone-<n>.<suffix>.part      a large slot that was deleted, and whose memory is still to be given back (`Deleted`)

JSON files have digests (`smp_daemon.shared.records`). Whatever is damaged is this node's loss: it is removed, the log
names it, and the SMP goes on with what is left.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.shared.budget import Budget, pages
from holdfast.smp_daemon.shared.errors import ArenaInUse, ConfigError, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import is_at_once, is_identifier
from holdfast.smp_daemon.shared.logs import about, get_log
from holdfast.smp_daemon.shared.owners import Owners, is_taken, snapshot_in
from holdfast.smp_daemon.shared.paths import ARENA_ENV, BEGUN, GONE, OURS, SOCKET, not_private
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.records import PART, read_json, write, write_json
from holdfast.smp_daemon.shared.system import MACHINE, Files
from holdfast.smp_daemon.storage.pool import Deleted, Slot, SlotPool, SlotState, room, too_small

SHARD_SUFFIX = "safetensors"
PARITY_SUFFIX = "parity"
OVERFLOW_UID = 65534
"""The uid that the kernel reports in a container for a host user that is not mapped there."""

log = get_log(__name__)


class ArenaDirectory:
    """The directory of an arena, and the lock on it, which no damage to a file in it can undo. The kernel releases the
    lock when its owner dies. Not thread-safe: the store's lock guards it.

    Attributes:
        lost: names of files that were found damaged, and removed.
    """

    def __init__(self, path: Path, files: Files, made: bool) -> None:
        """Lock it. `made`: for this owner. Raises `OSError`, and `BlockingIOError` if another process has it."""
        self.lost: set[str] = set()
        self._path = path
        self._files = files
        self._made = made
        self._fd: Any = None
        self._close = files.close
        self._fd = files.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = files.fstat(self._fd)
        self._number = status.st_dev, status.st_ino
        files.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def is_gone(self) -> bool:
        """Whether the directory was deleted or moved away, or another SMP has made one in its place."""
        try:
            status = self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        return (status.st_dev, status.st_ino) != self._number

    def unmake(self) -> None:
        """The start failed: remove the directory if it was made for it, so that nothing stays behind."""
        if self._made:
            self._files.rmtree(self._path)

    def clear_the_way(self, deleted: Deleted) -> None:
        """Remove what a predecessor was killed over, and what is no file of ours although it has the name of one.
        Raises `ConfigError` if something cannot be removed. `deleted`: takes large files.
        """
        for path in sorted(self._path.glob("*")):
            if OURS.fullmatch(path.name) and not path.name.startswith("smp.log"):  # others are not read by an SMP
                with suppress(FileNotFoundError):  # a trainer has renamed the mark of its slot meanwhile
                    self._clear(path, deleted)

    def _clear(self, path: Path, deleted: Deleted) -> None:
        status = path.lstat()
        if path.name.endswith(PART):
            unwiped = status.st_size if deleted.zero and path.name.startswith(GONE) else 0
            if not (stat.S_ISREG(status.st_mode) and deleted.takes(path, unwiped=unwiped)):
                put_away(path, self._files)
        elif path.name == SOCKET and stat.S_ISSOCK(status.st_mode):
            return  # whoever listens at it is replaced by `bind_unix`
        elif not stat.S_ISREG(status.st_mode) or status.st_uid != self._files.getuid():
            self.note_lost(path, "it is not a regular file of this user")
        elif status.st_mode & 0o600 != 0o600:
            path.chmod(0o600)
            log.warning("%s could not be read and written by its owner: its mode is set again", path)

    def note_lost(self, path: Path, why: object) -> None:
        """Remove a damaged file, and say so. Raises `ConfigError` if it cannot be removed."""
        self.lost.add(path.name)
        log.warning("%s is lost, and is removed: %s", path, why, extra=about(file=path.name))
        put_away(path, self._files)

    def lacks(self, path: Path) -> bool:
        """Whether somebody has deleted or emptied a small JSON file, or put something else in its place."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return True
        return not stat.S_ISREG(status.st_mode) or not status.st_size

    def write_again(self, path: Path, content: bytes) -> None:
        """Write a small JSON file that is lacking: a successor believes nothing without it.

        Raises:
            ArenaTooSmall: it cannot be written.
            ConfigError: as `put_away`.
        """
        put_away(path, self._files)
        write(path, content)
        log.warning("%s was lost and is written again", path, extra=about(file=path.name))

    def close(self) -> None:
        """Release it; harmless if it is released already."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._close(fd)

    __del__ = close


def locked_directory(path: Path, files: Files) -> ArenaDirectory:
    """Make the arena's directory if there is none, and lock it. Raises `ConfigError`; `ArenaInUse` if another process
    has the lock."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_parent(path.parent, files.getuid())
            made = _make(path)
        except OSError as error:
            raise ConfigError(
                f"cannot make the arena {path}: {error.strerror}; choose another with HOLDFAST_ARENA"
            ) from error
        failpoint("arena.made")
        try:
            _check_content(path)
            if wrong := not_private(path, files.getuid()):
                raise ConfigError(f"the arena {path} {wrong}")
            directory = ArenaDirectory(path, files, made)
        except FileNotFoundError:
            continue  # its last owner has just removed it
        except BlockingIOError as error:
            raise ArenaInUse(f"another SMP owns the arena {path}: use it, or stop it first") from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock the arena {path}: {error.strerror}; choose another with {ARENA_ENV}"
            ) from error
        if not directory.is_gone:
            return directory
        directory.close()  # as above


def _make(path: Path) -> bool:
    """Make a directory. Returns whether it is new: another SMP may have made it at this moment. Raises `OSError`."""
    try:
        path.mkdir(mode=0o700)
        return True
    except FileExistsError:
        path.mkdir(exist_ok=True)  # raises if it is no directory
        return False


def put_away(path: Path, files: Files = MACHINE) -> None:
    """Remove whatever has this name; a directory with all that is in it. Links are not followed.

    Raises:
        ConfigError: it cannot be removed.
    """
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            files.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # it is gone already
    except OSError as error:
        raise ConfigError(
            f"{path} is in the way of this node's SMP, which cannot remove it: {error}: remove it"
        ) from error


def _check_parent(path: Path, uid: int) -> None:
    """Raise `ConfigError` if the directory with the arena belongs to another user, who could replace the arena."""
    status = path.lstat()
    if status.st_uid not in (uid, 0, OVERFLOW_UID):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, who could replace the arena in it: choose another with "
            f"{ARENA_ENV}, or start the job as that user"
        )
    if not status.st_mode & 0o022 or status.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode):
        return
    if status.st_mode & 0o002:
        raise ConfigError(f"every user may write to {path}, and so replace the arena in it: chmod +t or go-w it")
    log.warning("its group may write to %s, and so replace the arena in it: run chmod g-w on it", path)


def _check_content(path: Path) -> None:
    """Raise `ConfigError` if the directory is another software's: all that is in an arena is removed with it."""
    names = sorted(each.name for each in path.glob("*"))
    foreign = next((name for name in names if not OURS.fullmatch(name)), None)
    if foreign is not None and not any(name in BEGUN for name in names):
        raise ConfigError(
            f"{path} is no arena, and has files such as {foreign}: choose a directory for arenas alone with {ARENA_ENV}"
        )


class LayoutFiles(dict[tuple[int, int], Layout]):
    """The known layouts by epoch and revision, with their files. Not thread-safe: the store's lock guards them."""

    def __init__(self, arena: Path, files: Files) -> None:
        super().__init__()
        self._arena = arena
        self._files = files

    def add(self, layout: Layout) -> None:
        """Write a layout to the arena and remember it."""
        write_json(self._path(layout.epoch, layout.revision), to_plain(layout))
        self[layout.epoch, layout.revision] = layout

    def adopt(self, lose: Callable[[Path, ProtocolError], None]) -> None:
        """Remember the layouts that a predecessor left.

        The bytes coded in a damaged one stay: they have their own records, and other nodes still know the layout.

        Args:
            lose: called with each damaged file, and with what is wrong.
        """
        for path in sorted(self._arena.glob("layout-*.json")):
            try:
                layout = Layout.read(read_json(path, self._files))
                if path != self._path(layout.epoch, layout.revision):
                    raise ProtocolError(f"it is of epoch {layout.epoch}, revision {layout.revision}")
                self[layout.epoch, layout.revision] = layout
            except ProtocolError as error:
                lose(path, error)

    def files(self) -> Iterator[tuple[Path, Layout]]:
        """Each file, and what is in it."""
        return ((self._path(*of), layout) for of, layout in self.items())

    def drop_older(self, keep: Collection[int]) -> None:
        """Delete the layouts of epochs before the newest that are not in `keep`."""
        newest = max((epoch for epoch, _ in self), default=0)
        for epoch, revision in list(self):
            if epoch < newest and epoch not in keep:
                del self[epoch, revision]
                self._path(epoch, revision).unlink(missing_ok=True)
                failpoint("layout.removed")

    def _path(self, epoch: int, revision: int) -> Path:
        return self._arena / f"layout-{epoch}-{revision}.json"


class Arena:
    """All pools of one SMP. Not thread-safe: the store's lock guards it. Any thread may read views without the lock.

    Attributes:
        directory: the arena's, locked.
        deleted: large files that were deleted.
    """

    def __init__(self, path: Path, *, memory: int = 0, zero: bool = False, files: Files = MACHINE) -> None:
        """Create or take over the directory `path`.

        Args:
            memory: most bytes that slots may take; 0: no limit. `reserve_rest` reserves them.
            zero: overwrite slots with zeros when they are given up.

        Raises:
            ArenaInUse: another SMP owns the directory.
            ConfigError: it belongs to another user, it cannot be made, or something in
                it cannot be removed.
        """
        self.path = path
        self.files = files
        self.deleted = Deleted(files, zero=zero)
        self.directory = locked_directory(path, files)
        self.directory.clear_the_way(self.deleted)
        self.budget = Budget(path, memory)
        self.owners = Owners(path)
        self.shards: dict[str, SlotPool] = {}
        self.parities: dict[tuple[str, int], SlotPool] = {}
        self.layouts = LayoutFiles(path, files)
        self._wanted: dict[SlotPool, tuple[int, int]] = {}
        self._planned: list[tuple[SlotPool, Slot]] = []

    def shard_pool(self, coord: str) -> SlotPool:
        """The pool of a shard, empty if it is new."""
        if coord not in self.shards:
            self.shards[coord] = self._pool(coord, SHARD_SUFFIX, self.owners)
        return self.shards[coord]

    def parity_pool(self, tag: str, position: int) -> SlotPool:
        """The pool of the parity of one position of the group with that tag, empty if it is new."""
        if (tag, position) not in self.parities:
            self.parities[tag, position] = self._pool(f"{tag}-{position}", PARITY_SUFFIX, Owners(self.path))
        return self.parities[tag, position]

    def _pool(self, name: str, suffix: str, owners: Owners) -> SlotPool:
        return SlotPool(self.path, name, suffix, self.budget, owners, self.deleted, self.files)

    def room(self) -> int:
        """Free bytes on the file system, once what is deleted is given back."""
        return self.free_bytes() + self.deleted.bytes

    def free_bytes(self) -> int:
        """Free bytes on the file system now."""
        return room(self.path, self.files)

    def next_unwiped(self) -> tuple[SlotPool, Slot] | None:
        """A free slot that was given up and is not overwritten with zeros yet."""
        slots = ((pool, slot) for pool in self.pools() for slot in pool.slots)
        return next(((pool, slot) for pool, slot in slots if slot.state is SlotState.FREE and slot.unwiped), None)

    def pools(self) -> Iterator[SlotPool]:
        """Every pool."""
        yield from self.shards.values()
        yield from self.parities.values()

    def look(self, pool: SlotPool) -> None:
        """Note which slots its trainer has taken, and give up those whose files are gone. `reserve` and `plan_missing`
        make others."""
        pool.look()
        for slot in pool.lost():
            self.directory.note_lost(pool.path(slot), "somebody has deleted or replaced it")
            pool.remove(slot)

    def reserve(self, wanted: dict[SlotPool, tuple[int, int]]) -> None:
        """Give each pool `count` slots of `length` bytes; ``wanted[pool] = (length, count)``.

        Free and unfinished slots of pools or lengths that are not wanted are deleted first. Slots that hold a snapshot
        stay, whatever their length. Nothing is created unless everything fits. If more than `AT_ONCE_BYTES` are
        missing, they are only planned, for a `Reserver`.

        Raises:
            ArenaTooSmall: the message names the need, the room and the fix.
        """
        self._remove_unwanted(wanted)
        missing = _missing(wanted)
        need = sum(pages(length) for _, length in missing)
        self.budget.check(need)
        left = self.room()
        if need + self.budget.owed > left + self.budget.held:
            raise too_small(self.path, need, left)
        if is_at_once(need) and not self.deleted.bytes:
            self._create(missing)
        else:
            earlier = [(pool, slot) for pool, slot in self._planned if slot.state is SlotState.MAKING]
            self._planned = [*earlier, *((pool, pool.plan(length)) for pool, length in missing)]
        self._wanted = wanted
        self.reserve_rest()

    def _remove_unwanted(self, wanted: dict[SlotPool, tuple[int, int]]) -> None:
        for pool in list(self.pools()):
            length, _ = wanted.get(pool, (None, 0))
            for slot in [s for s in pool.slots if s.state in (SlotState.FREE, SlotState.MAKING) and s.bytes != length]:
                if not slot.claimed:
                    pool.remove(slot)

    def plan_missing(self) -> None:
        """Plan what is missing of the slots that `reserve` was asked for, for a `Reserver`, as far as there is memory.

        `make_room` deletes such slots for bytes from elsewhere, which may be given up before the next `reserve`.
        """
        missing = _missing(self._wanted)
        if missing:
            self._remove_unwanted(self._wanted)
        for pool, length in missing:
            need, left = pages(length), self.room() + self.budget.held - self.budget.owed
            allowed = not self.budget.limit or need <= self.budget.left
            if allowed and need <= left:
                pool.plan(length)

    def _create(self, missing: Sequence[tuple[SlotPool, int]]) -> None:
        created: list[tuple[SlotPool, Slot]] = []
        try:
            for pool, length in missing:
                created.append((pool, pool.create(length)))
        except BaseException:
            for pool, slot in created:
                pool.remove(slot)
            raise

    def next_planned(self) -> tuple[SlotPool, Slot] | None:
        """The planned slot to make next: every pool gets its first slot before any pool gets a second. Among these the
        largest comes first."""
        planned = [
            (sum(other.state is not SlotState.MAKING for other in pool.slots), -slot.bytes, number, pool, slot)
            for number, pool in enumerate(self.pools())
            for slot in pool.slots
            if slot.state is SlotState.MAKING and not slot.claimed
        ]
        return min(planned, key=lambda each: each[:3])[3:] if planned else None

    def ready(self) -> int | None:
        """How many of the slots that `reserve` was asked for are made in every pool; None if all are."""
        missing = {
            pool: sum(slot.state is SlotState.MAKING for slot in pool.slots) for pool in self._wanted if pool.slots
        }
        return min((self._wanted[pool][1] - count for pool, count in missing.items() if count), default=None)

    def planned_bytes(self) -> int:
        """How many bytes of the planned slots are not reserved yet."""
        slots = [slot for pool in self.pools() for slot in pool.slots if slot.state is SlotState.MAKING]
        return sum(slot.bytes - slot.reserved for slot in slots)

    def give_up_planned(self) -> tuple[int, int]:
        """Delete the slots that `reserve` planned, and those made from the same plan that are free. Returns the bytes
        of the plan, and how many of them were reserved."""
        need, missing = sum(slot.bytes for _, slot in self._planned), self.planned_bytes()
        for pool, slot in self._planned:
            if slot.state in (SlotState.FREE, SlotState.MAKING) and any(slot is other for other in pool.slots):
                pool.remove(slot)
        self._planned = []
        return need, need - missing

    def is_of_plan(self, slot: Slot) -> bool:
        """Whether `reserve` has planned a slot."""
        return any(slot is planned for _, planned in self._planned)

    def reserved(self, pool: SlotPool) -> list[Slot]:
        """The slots of a pool that `reserve` was asked for and that are made, whatever they hold."""
        length, _ = self._wanted.get(pool, (None, 0))
        return [slot for slot in pool.slots if slot.bytes == length and slot.state is not SlotState.MAKING]

    def retry(self) -> None:
        """Reserve the rest of the budget after all, if memory had run out and there is enough now."""
        if self.budget.ran_out and self.budget.rest <= self.room():
            self.budget.ran_out = False

    def reserve_rest(self) -> None:
        """Reserve the memory that slots may still take, if that is little; else the `Reserver` does it.

        Raises:
            ArenaTooSmall: see `Budget.check_limit`, and `Budget.reserve_next`.
        """
        self.budget.check_limit(self.room())
        self.retry()
        if is_at_once(self.budget.missing):
            while self.budget.reserve_next(self.free_bytes, nullcontext()):
                pass

    def release(
        self, keep: Collection[SnapshotId], before: SnapshotId, with_parity: Collection[SnapshotId] | None = None
    ) -> None:
        """Free sealed slots of snapshots older than `before`, except shards of snapshots in `keep`, or that are held,
        and parity of snapshots in `with_parity` (None: `keep`).

        Slots that `reserve` was not asked for are deleted with their files. So are layouts of older epochs of which no
        snapshot is kept or held.
        """
        parities = keep if with_parity is None else with_parity
        for pool in self.pools():
            length, count = self._wanted.get(pool, (None, 0))
            is_shard = pool.suffix == SHARD_SUFFIX
            for slot in pool.outdated(keep if is_shard else parities, before):
                # Shard slots of the wanted length stay, even surplus ones: a trainer may have all slots of its shard
                # mapped, so deleting the file would not free the memory.
                asked_for = is_shard or sum(each.bytes == length for each in pool.slots) <= count
                if slot.bytes == length and asked_for:
                    pool.discard(slot)
                else:
                    pool.remove(slot)
        held = [slot.snapshot for pool in self.shards.values() for slot in pool.slots if slot.held and slot.snapshot]
        self.layouts.drop_older({snapshot.epoch for snapshot in (*keep, *held)})

    def make_room(self, length: int, wanted: SlotPool) -> int:
        """Delete free slots of other pools, the largest first, until `length` bytes are freed. Returns the bytes freed.

        Bytes received for another node take the memory of slots that wait for snapshots; `reserve` and `plan_missing`
        plan new ones.
        """
        freed = 0
        spare = [(slot.bytes, pool, slot) for pool in self.pools() if pool is not wanted for slot in pool.slots]
        for _, pool, slot in sorted(spare, key=lambda item: -item[0]):
            if freed >= length:
                break
            if slot.state is SlotState.FREE and not slot.claimed and pool.remove(slot):
                freed += slot.bytes
        return freed

    def fence(self, epoch: int) -> None:
        """Enter `epoch`: no process of an older one can take a slot from then on, and every slot that somebody writes
        is taken away: its writer goes on in a file that no slot uses, and `reserve` makes another."""
        for shards in self.shards.values():
            shards.fence(epoch)
        failpoint("fence.marked")
        self.owners.epoch = epoch
        for pool in self.pools():
            for slot in [slot for slot in pool.slots if slot.is_being_filled]:
                pool.remove(slot)

    def own(self, epoch: int) -> None:
        """Mark who owns the slots that a predecessor left, as of `epoch`. Its trainer may be taking some of them."""
        self.owners.epoch = epoch
        found = self.owners.found()
        for pool in self.shards.values():
            for slot in list(pool.slots):
                if not pool.adopted(slot, found.pop(pool.path(slot).name, [])):
                    pool.remove(slot)
        for file in found:
            self.owners.clear(file)  # its slot was lost

    def adopt(self) -> Iterator[tuple[SlotPool, Slot, Any]]:
        """Find the slots that a predecessor left, and yield each that has a commit record with that record. The caller
        accepts or discards the slot.

        Slots without a commit record become free; those that their trainer has taken stay as they are. A damaged record
        counts as missing, and so does one whose slot is not marked as sealed.
        """
        marks = self.owners.found()
        for suffix in (SHARD_SUFFIX, PARITY_SUFFIX):
            for path in sorted(self.path.glob(f"*.*.{suffix}")):
                yield from self._adopt_file(path, suffix, [owner for owner, _ in marks.get(path.name, [])])
            for path in list(self.path.glob(f"*.{suffix}.json")):
                if not path.with_suffix("").exists():
                    path.unlink()  # its slot was lost

    def _adopt_file(self, path: Path, suffix: str, marks: list[str]) -> Iterator[tuple[SlotPool, Slot, Any]]:
        name, index, _ = path.name.rsplit(".", 2)
        tag, _, position = name.rpartition("-")
        length = path.lstat().st_size
        named = is_identifier(name) and _is_count(index) and (suffix == SHARD_SUFFIX or _is_count(position))
        if not named or not length:
            self.directory.note_lost(path, "it is not a slot of this arena" if length else "it is empty")
            return  # its record goes with it, see `adopt`
        pool = self.shard_pool(name) if suffix == SHARD_SUFFIX else self.parity_pool(tag, int(position))
        slot = Slot(int(index), length)
        pool.slots.append(slot)
        self.budget.note(slot.bytes)
        if any(map(is_taken, marks)):
            slot.state = SlotState.WRITING
            return
        try:
            record = read_json(pool.record_path(slot), self.files)
        except ProtocolError as error:
            self.directory.note_lost(pool.record_path(slot), error)
            record = None
        if record is None or (marks and _snapshot_of(record) not in map(snapshot_in, marks)):
            slot.state = SlotState.RECEIVING  # somebody may have been filling it
            pool.discard(slot)
        else:
            yield pool, slot, record

    def clear(self) -> None:
        """Delete slots and layouts that no longer count: a predecessor was killed while it removed the arena."""
        for pattern in (f"*.{SHARD_SUFFIX}*", f"*.{PARITY_SUFFIX}*", "layout-*"):
            for path in list(self.path.glob(pattern)):
                log.info("%s is left over from a removed arena and is deleted", path.name)
                if not self.deleted.takes(path):
                    path.unlink(missing_ok=True)
        self.layouts.clear()

    def empty(self) -> None:
        """Delete all slots. ``node.json``, without which no slot counts, goes first: if this is interrupted, a
        successor finds nothing to adopt."""
        (self.path / "node.json").unlink(missing_ok=True)
        for pool in self.pools():
            for slot in list(pool.slots):
                pool.remove(slot)  # what its trainer takes at this moment is removed by `destroy`

    def destroy(self) -> None:
        """Remove the directory and everything in it. The file that says who owns the arena goes last, so that
        `holdfast gc` still finds the directory if this is interrupted."""
        self.empty()
        for path in list(self.path.glob("*")):
            if path.name != "smp.json":
                put_away(path, self.files)
        failpoint("arena.emptied")
        self.files.rmtree(self.path)
        failpoint("arena.removed")


def _missing(wanted: dict[SlotPool, tuple[int, int]]) -> list[tuple[SlotPool, int]]:
    """The pool and the length of each slot that is wanted and is neither there nor planned."""
    return [
        (pool, length)
        for pool, (length, count) in wanted.items()
        if length
        for _ in range(count - sum(slot.bytes == length for slot in pool.slots))
    ]


def _snapshot_of(record: Any) -> Any:
    """The snapshot of a commit record that has not been checked yet."""
    snapshot = record.get("snapshot") if isinstance(record, dict) else None
    return tuple(snapshot) if isinstance(snapshot, list) else None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
