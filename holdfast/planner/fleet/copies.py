"""Which saved steps can still be had, as nodes lose their memory and get it back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from holdfast.planner.fleet.groups import Groups
from holdfast.planner.fleet.progress import Timeline


class Copies:
    """The newest step of each kind that is left.

    A node counts against its group from the loss of its memory until the group has made up for it; each loss has a
    ticket, so that what was on its way for an earlier one comes too late (`degraded`, `made_up`).

    Attributes:
        sealed: on every node; None if a node's own copy is gone.
        protected: can be had although nodes are lost; None if there is none, or too many were.
        persisted: on storage; 0, where the job began, is always there.
        beyond: how often all copies in memory were lost: more than the parity covers, or before any was protected.
    """

    def __init__(self, groups: Groups | None) -> None:
        self.sealed: int | None = None
        self.protected: int | None = None
        self.persisted = 0
        self.beyond = 0
        self._groups = groups
        self._pending: list[tuple[float, int]] = []
        self._degraded: dict[int, int] = {}
        self._missing: Counter[int] = Counter()
        self._tickets = 0

    def trained(self, pace: Timeline, first: int, since_s: float, now_s: float) -> None:
        """The job has trained from step `first` without interruption, and stops now."""
        elapsed = now_s - since_s
        self.settle(now_s)
        if protected := pace.newest("protected", first, elapsed):
            self.protected = protected.step
        if persisted := pace.newest("persisted", first, elapsed):
            self.persisted = persisted.step
        if sealed := pace.newest("sealed", first, elapsed):
            self.sealed = sealed.step
            if sealed.step != self.protected:
                self._pending.append((since_s + sealed.finished_s + sealed.save.protected_s, sealed.step))

    def settle(self, now_s: float) -> None:
        """What was sealed becomes protected while the job stands still, too: that is not the trainers' work."""
        while self._pending and self._pending[0][0] <= now_s:
            self.protected = max(self._pending.pop(0)[1], self.protected or 0)

    def lose(self, nodes: Iterable[int], now_s: float) -> None:
        """These nodes' memory is gone."""
        self.settle(now_s)
        self._pending.clear()
        groups = set()
        for node in nodes:
            self._tickets += 1
            if self._groups is not None:
                groups.add(self._groups.of[node])
                self._missing[self._groups.of[node]] += node not in self._degraded
            self._degraded[node] = self._tickets
        had = self.sealed is not None or self.protected is not None
        self.sealed = None
        parity = self._groups.parity if self._groups else 0
        if not groups or any(self._missing[group] > parity for group in groups) or self.protected is None:
            self.protected = None
            self.beyond += had

    def made_up(self, node: int, ticket: int) -> None:
        """What the node held is protected again, unless it was lost once more after the loss with this ticket."""
        if self._degraded.get(node) == ticket:
            del self._degraded[node]
            if self._groups is not None:
                self._missing[self._groups.of[node]] -= 1

    def is_open(self, node: int, ticket: int) -> bool:
        """Whether the loss with this ticket is not made up for."""
        return self._degraded.get(node) == ticket

    @property
    def degraded(self) -> dict[int, int]:
        """Nodes that count against their group, and their tickets."""
        return dict(self._degraded)

    def best(self) -> tuple[str, int]:
        """The newest step that can be had, and as what."""
        found = [("persisted" if self.persisted else "start", self.persisted)]
        found += [("protected", self.protected)] if self.protected is not None else []
        found += [("sealed", self.sealed)] if self.sealed is not None else []
        return max(reversed(found), key=lambda each: each[1])

    def restored(self, source: str, step: int) -> None:
        """All nodes have loaded `step`."""
        if source in ("sealed", "protected"):
            self.sealed = step
        else:
            self.sealed = self.protected = None
            self._pending.clear()
            self._degraded.clear()
            self._missing.clear()
