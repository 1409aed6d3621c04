"""The checks of every run, by name. Each text says what must hold; reports and shortened histories print it.

A check is counted each time it looks at something that could have been wrong, so a check that never looks at anything
is noticed. Each build that is broken on purpose names the check that must notice it.
"""

from __future__ import annotations

CHECKS = {
    "epoch": "nothing is sealed on a node that is in another epoch",
    "sealed": "what is sealed is what its trainer had",
    "kept": "the newest protected snapshot is not given up",
    "held": "with three slots or more the newest sealed snapshot is not given up",
    "unasked": "no parity is made of a snapshot that is not to be protected",
    "exact": "a step that is done again begins with the same state as before, bit for bit",
    "restored": "what is restored is what was captured, bit for bit",
    "complete": "what is restored lacks nothing that was captured",
    "named": "no two starts give an epoch one name, and no two trainers write one shard of a snapshot",
    "own run": "a start goes on with the run that was begun or chosen last, or begins one that nobody knows",
    "nothing": "a job begins from nothing only if nothing is left that was promised or persisted and not given up",
    "told": "a start that is refused is refused rightly, and the user learns what to do",
    "promise": "a protected snapshot comes back while no more is lost than its parity makes up for",
    "crash": "after a crash of processes alone the newest sealed snapshot comes back",
    "persisted": "if memory has nothing, what was persisted comes back",
    "floor": "what a surviving node knows to be protected is never undone",
    "together": "all trainers go on from the same snapshot",
    "recoverable": "the job is not told that nothing can be restored while enough is left",
    "whole": "at rest, what is sealed is still what its trainer had",
    "once": "an arena holds a shard of a snapshot once",
    "memory": "no more memory is held than was asked for",
    "ends": "every life of a job ends",
    "returns": "once the faults are over, the job comes back and goes on",
    "progress": "once the faults are over, snapshots become protected",
    "announced": "a node that is drained while the job trains costs no step, and is not needed any more",
    "free": "a job that has ended leaves nothing behind",
    "lock": "the store's lock is not held for as long as there are bytes to reserve, map, digest or overwrite",
    "calm": "while nothing has struck, nothing warns, is given up, times out or is started again",
    "serves": "an SMP serves soon after it has begun, whatever its arena holds",
    "connected": "all ranks of a node have an SMP about as soon as one alone would",
    "said": "where no SMP can be started, the job is told why",
    "waits": "no training thread waits longer than for its copy, and for an SMP as long as it may",
    "answered": "no call takes longer than its deadline",
    "back": "after a start protection is back in the time that bytes over rates allow, a few times over",
    "rest": "no thread waits for ever",
    "bug": "no thread ends with an unexpected error",
}
