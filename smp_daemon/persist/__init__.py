"""The persist tier: protected snapshots written to a directory or an fsspec URL, seldom, and read back when memory is
lost.

`shardfile` (the bytes of one shard), `planes` and `manifest` (which files make a snapshot, and which may go) are pure.
`place` is where the files are; `writing`, `reading` and `persister` act. Nothing here knows of torch, or of groups and
parity: what is persisted is what was sealed. Start reading at `persister`.
"""

__all__ = ["manifest", "options", "persister", "place", "reading"]
