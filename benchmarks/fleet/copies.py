"""Which saved steps can still be restored, as nodes lose their memory and get it back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from benchmarks.fleet.groups import Groups
from benchmarks.fleet.progress import Timeline


class Copies:
    """The newest step of each kind that can be restored.

    A node is *degraded*, and counts against the parity of its group, from the loss of its memory until its bytes are
    protected again. Each loss has a ticket, so that a repair that began for an earlier loss of the node is ignored.

    Attributes:
        sealed: the newest step sealed on every node; None if a node has lost its own copy.
        protected: the newest step that survives lost nodes; None if there is none, or too many nodes were lost.
        persisted: the newest step on storage; 0, where the job began, can always be restored.
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
        """Record what was saved: the job has trained from step `first` without interruption, and stops now."""
        elapsed = now_s - since_s
        self.settle(now_s)
        if protected := pace.newest("protected", first, elapsed):
            self.protected = protected.step
        if persisted := pace.newest("persisted", first, elapsed):
            self.persisted = persisted.step
        if sealed := pace.newest("sealed", first, elapsed):
            self.sealed = sealed.step
            for save in pace.saves:  # the newest sealed step that is to be protected: it may be older than `sealed`
                step = sealed.step // save.every * save.every
                if save.protected_s < math.inf and step > max(first, self.protected or 0):
                    self._pending.append((since_s + pace.finished_s(first, step) + save.protected_s, step))

    def settle(self, now_s: float) -> None:
        """Mark sealed steps as protected by now. That goes on while the job stands still: SMPs do it, not trainers."""
        while self._pending and self._pending[0][0] <= now_s:
            self.protected = max(self._pending.pop(0)[1], self.protected or 0)

    def lose(self, nodes: Iterable[int], now_s: float) -> None:
        """Record that these nodes have lost their memory."""
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

    def repaired(self, node: int, ticket: int) -> None:
        """Record that the node's bytes are protected again, unless it was lost again after the loss with `ticket`."""
        if self._degraded.get(node) == ticket:
            del self._degraded[node]
            if self._groups is not None:
                self._missing[self._groups.of[node]] -= 1

    def is_open(self, node: int, ticket: int) -> bool:
        """Whether the node is still degraded by the loss with this ticket."""
        return self._degraded.get(node) == ticket

    @property
    def degraded(self) -> dict[int, int]:
        """Degraded nodes, with the tickets of their losses."""
        return dict(self._degraded)

    def best(self) -> tuple[str, int]:
        """The newest step that can be restored, with its kind first: sealed, protected, persisted, or the start."""
        found = [("persisted" if self.persisted else "start", self.persisted)]
        found += [("protected", self.protected)] if self.protected is not None else []
        found += [("sealed", self.sealed)] if self.sealed is not None else []
        return max(reversed(found), key=lambda each: each[1])

    def restored(self, source: str, step: int) -> None:
        """Record that all nodes have loaded `step`."""
        if source in ("sealed", "protected"):
            self.sealed = step
        else:
            self.sealed = self.protected = None
            self._pending.clear()
            self._degraded.clear()
            self._missing.clear()
