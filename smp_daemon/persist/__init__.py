"""The persist tier: writes protected snapshots to a directory or an fsspec URL now and then, and reads them back when
memory is lost.

What is persisted of a shard is what an SMP holds of it: the slot file, and the commit record with the digests of its
units. `manifest` (which files make a snapshot, and which may be removed) is pure. `place` accesses the storage;
`reading` and `persister` use it. Nothing here depends on torch, or on groups and parity. Start reading at `persister`.
"""

__all__ = ["persister", "place", "reading"]
