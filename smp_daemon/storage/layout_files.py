"""The layouts that a node knows: in memory, and as files in its arena for a successor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.records import read_json, write_json
from holdfast.smp_daemon.shared.system import Files


class LayoutFiles(Mapping[tuple[int, int], Layout]):
    """The known layouts by epoch and revision. Not thread-safe: the store's lock guards them."""

    def __init__(self, arena: Path, files: Files) -> None:
        self._arena = arena
        self._files = files
        self._known: dict[tuple[int, int], Layout] = {}

    def __getitem__(self, key: tuple[int, int]) -> Layout:
        return self._known[key]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def newest(self) -> Layout | None:
        """Of the newest epoch, as its SMPs last regrouped it."""
        return self[max(self)] if self else None

    def add(self, layout: Layout) -> None:
        """Write a layout to the arena and remember it."""
        write_json(self._path(layout.epoch, layout.revision), to_plain(layout))
        self._known[layout.epoch, layout.revision] = layout

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
                self._known[layout.epoch, layout.revision] = layout
            except ProtocolError as error:
                lose(path, error)

    def drop_older(self, keep: Collection[int]) -> None:
        """Delete the layouts of epochs before the newest that are not in `keep`."""
        newest = max((epoch for epoch, _ in self), default=0)
        for epoch, revision in list(self):
            if epoch < newest and epoch not in keep:
                del self._known[epoch, revision]
                self._path(epoch, revision).unlink(missing_ok=True)
                failpoint("layout.removed")

    def forget(self) -> None:
        """Forget them all. Their files are the caller's."""
        self._known.clear()

    def _path(self, epoch: int, revision: int) -> Path:
        return self._arena / f"layout-{epoch}-{revision}.json"
