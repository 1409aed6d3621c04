"""The persist tier: writes protected snapshots to a directory or an fsspec URL now and then, and reads them back when
memory is lost.

`shardfile` (the bytes of one shard), `planes` and `manifest` (which files make a snapshot, and which may be removed)
are pure. `place` accesses the storage; `writing`, `reading` and `persister` use it. Nothing here depends on torch, or
on groups and parity: the sealed bytes are what is persisted. Start reading at `persister`.
"""

__all__ = ["manifest", "options", "persister", "place", "reading"]
