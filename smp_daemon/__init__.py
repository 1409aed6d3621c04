"""The snapshot management process (SMP): holds a node's snapshots while trainers come and go.

It owns an arena of slot files on tmpfs, seals the shards that trainers write, keeps parity with its group, and serves
and rebuilds shards. It never imports torch or unpickles anything, and never trusts a size that another process sent.

Start reading at `smp_daemon.service` (the process), then `smp_daemon.shared`: `slotfile` and `records` (the files of
the arena), `layout` (the shape of a job) and `client` (the trainer's side).
"""

__all__ = ["__main__"]
