"""What is checked of every run, by name: what must hold, in the words in which a violation is reported.

Each check is counted when it looks at something that could have been wrong, so that one which never does is seen; and a
build that is broken on purpose names the check that must notice it.
"""

from __future__ import annotations

CHECKS = {
    "fenced": "no two trainers write one shard of a snapshot",
    "epoch": "nothing is sealed on a node that is in another epoch",
    "sealed": "what is sealed is what its trainer had",
    "kept": "the newest protected snapshot is not given up",
    "held": "with three slots or more the newest sealed snapshot is not given up",
    "unasked": "no parity is made of a snapshot that is not to be protected",
    "exact": "a job that went on begins each step with what it once began it with, bit for bit",
    "restored": "what is restored is what was captured, bit for bit",
    "promise": "a protected snapshot comes back while no more is lost than its parity makes up for",
    "crash": "after a crash of processes alone the newest sealed snapshot comes back",
    "persisted": "if memory has nothing, what was persisted comes back",
    "floor": "what a node that is left knows to be protected is never undone",
    "together": "all trainers go on from the same snapshot",
    "recoverable": "nobody is told that nothing can be had while enough is left",
    "whole": "what lies sealed at rest is what its trainer had",
    "once": "an arena holds a shard of a snapshot once",
    "memory": "no more memory is held than was asked for",
    "ends": "every life of a job ends",
    "returns": "once the faults are over, the job comes back and goes on",
    "progress": "once the faults are over, snapshots become protected",
    "free": "a job that has ended leaves nothing behind",
    "rest": "nobody waits for ever",
    "bug": "no thread ends by an error that nobody expects",
}
