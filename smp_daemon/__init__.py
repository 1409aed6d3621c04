"""The snapshot management process (SMP): holds a node's snapshots while trainers come and go.

It owns an arena of slot files on tmpfs, seals what trainers wrote, keeps parity with its group, serves and rebuilds
shards. It never imports torch, and never unpickles or trusts the size of anything that it did not write.

Start reading at `smp_daemon.service` (the process), then `smp_daemon.shared`: `slotfile` and `records` (what lies in
the arena), `layout` (what a job looks like) and `client` (the trainer's side).
"""

__all__ = ["__main__", "service"]
