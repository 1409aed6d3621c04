"""The training process's part in ``holdfast profile``: records what snapshots cost, and ends the job with status 0.

It is requested through the environment; see `holdfast.cli.profile` for the other part.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.interval.recorder import Alternation, Location, RankRecording, merge
from holdfast.snapshot.interval.samples import Timing

if TYPE_CHECKING:
    from holdfast.snapshot.collective.agreement import Agreement

PROFILE_ENV = "HOLDFAST_PROFILE"


@dataclass(frozen=True, slots=True)
class RecordingOrders:
    """What to record.

    Attributes:
        file: where rank 0 writes the profile.
        steps: how many steps to record, after the warm-up steps.
    """

    file: str
    steps: int

    def to_environment(self) -> dict[str, str]:
        """The environment variables that make a hook follow these orders."""
        return {PROFILE_ENV: json.dumps(asdict(self))}


def recording_from_environment(slots: int) -> Recording | None:
    """The recording that was requested, if any. Raises `ConfigError` if the orders are malformed."""
    text = os.environ.get(PROFILE_ENV)
    if not text:
        return None
    try:
        return Recording(RecordingOrders(**json.loads(text)), slots)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{PROFILE_ENV}={text!r} is not what `holdfast profile` sets: {error}") from None


class Recording:
    """Follows the orders on one rank. Called by the hook, in the training thread."""

    def __init__(self, orders: RecordingOrders, slots: int) -> None:
        self._orders = orders
        self.policy = Alternation(slots)
        self.timings: list[Timing] = []

    @property
    def over(self) -> bool:
        """Whether enough was recorded. The same on every rank, since all count the same steps."""
        return self.policy.recorded() >= self._orders.steps

    def write(self, layout: Layout, node: str, coord: str, agreement: Agreement) -> None:
        """Gather what all ranks recorded, and have rank 0 write the profile. A collective call; blocks.

        Raises:
            ConfigError: too little was recorded, or the file cannot be written.
        """
        data, parity = layout.code(layout.place(node)[0])
        mine = next(shard.bytes for shard in layout.node(node).shards if shard.coord == coord)
        place = Location(node, mine, layout.slots, data if parity else 0, parity)
        part = RankRecording(place, self.policy.baseline, self.policy.overlapped, self.policy.stalls, self.timings)
        parts = [decode_json(RankRecording, text, "what a rank saw") for text in agreement.gather(encode_json(part))]
        if agreement.rank == 0:
            self._save(parts)

    def _save(self, parts: Sequence[RankRecording]) -> None:
        text = json.dumps(merge(parts).to_json(), indent=2) + "\n"
        try:
            Path(self._orders.file).write_text(text)
        except OSError as error:
            raise ConfigError(f"the profile {self._orders.file} cannot be written: {error}") from error


def leave() -> None:
    """End this process with status 0. Nothing after the script's training loop runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
