"""How the persist tier is on one node, for people. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId


@dataclass(frozen=True, slots=True)
class Standing:
    """One node.

    Attributes:
        place: where snapshots are persisted; without passwords.
        every_s: how often, at most. `keep`: how many stay.
        state: ``waiting``, ``due``, ``writing`` or ``stuck``.
        persisted: the newest snapshot that this node knows to be whole there. `at_s`: when, in seconds since 1970.
        problem: why the last one failed; empty if it did not.
    """

    place: str
    every_s: float
    keep: int
    state: str = "waiting"
    persisted: SnapshotId | None = None
    at_s: float = 0.0
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return data | {"persisted": list(self.persisted) if self.persisted else None}

    @classmethod
    def from_json(cls, data: Any) -> Standing:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            return cls(
                place=str(data["place"]),
                every_s=float(data["every_s"]),
                keep=int(data["keep"]),
                state=str(data["state"]),
                persisted=SnapshotId(*map(int, data["persisted"])) if data["persisted"] else None,
                at_s=float(data["at_s"]),
                problem=str(data["problem"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"not how a persist tier is: {error!r}") from error
