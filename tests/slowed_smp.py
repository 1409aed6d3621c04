"""``python -m tests.slowed_smp``: an SMP to which bytes cost as much time as if its node held far more of them.

Whoever digests, reserves or sends bytes sleeps first, as many seconds for each GB as ``HOLDFAST_SLOWED`` says: a JSON
object such as ``{"digest": 2.0, "populate": 8.0, "send": 4.0}``.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.shared import belief, limits, records
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.storage import store

SLOWED = "HOLDFAST_SLOWED"


def main() -> None:
    """Run the SMP."""
    from holdfast.smp_daemon.__main__ import main as serve

    seconds: dict[str, float] = json.loads(os.environ[SLOWED])
    digest, digest_units, populate, send = records.digest, records.digest_units, System.populate, Links.send

    def spend(what: str, count: int) -> None:
        time.sleep(seconds[what] * count / 1e9)

    def slow_digest(data: memoryview) -> int:
        spend("digest", data.nbytes)
        return digest(data)

    def slow_digests(data: memoryview, unit_bytes: int) -> tuple[int, ...]:
        spend("digest", data.nbytes)
        return digest_units(data, unit_bytes)

    def slow_populate(mapped: Any, start: int = 0, count: int | None = None, /) -> None:
        spend("populate", len(mapped) if count is None else count)
        populate(mapped, start, count)

    def slow_send(self: Links, address: Any, message: Any, payload: memoryview | None = None) -> None:
        spend("send", payload.nbytes if payload is not None else 0)
        send(self, address, message, payload)

    for owner, name, slow in (
        (belief, "digest", slow_digest),
        (store, "digest_units", slow_digests),
        (System, "populate", staticmethod(slow_populate)),
        (Links, "send", slow_send),
    ):
        getattr(owner, name)  # what is not there any more would be slowed for nobody
        setattr(owner, name, slow)
    limits.AT_ONCE_BYTES = 0  # what is done at once with few bytes is done as with many
    serve()


if __name__ == "__main__":
    main()
