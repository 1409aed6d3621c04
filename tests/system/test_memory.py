"""Memory, files and threads of a trainer and its SMP stay the same over many snapshots."""

from __future__ import annotations

import json
import os
from collections import Counter
from statistics import fmean

import pytest

from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.deadlines import DEADLINE_S
from tests.sampling import sampled
from tests.scripts import python
from tests.smp_kit import kill_smps

TABLE_KIB = 1200
"""Python's table of names, which `pathlib` fills with those of each snapshot's files and empties again, grows by 1 MB
once. A leak of 4 kB with each snapshot is more."""

STEADY = """
import json, sys
import psutil, torch
from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.paths import arena_path, read_owner

torch.set_num_threads(1)
model = torch.nn.Linear(512, 680, bias=False)
optim = torch.optim.Adam(model.parameters(), lr=1e-6)
schedule = torch.optim.lr_scheduler.ConstantLR(optim)
seen = []


def memory(process):  # not its files: the kernel drops and reads those as it likes
    for line in open(f"/proc/{process.pid}/status"):
        if line.startswith(("RssAnon", "RssShmem")):
            yield int(line.split()[1])


with InMemorySnapshot(model, optim, scheduler=schedule, job="steady", overhead_budget=0) as snap:
    smp = psutil.Process(read_owner(arena_path("steady")).pid)
    for step in range(int(sys.argv[1])):
        optim.zero_grad()
        model(torch.ones(1, 512)).sum().backward()
        assert snap.drain(60), step  # both are at rest now
        seen.append([(sum(memory(p)), p.num_fds(), p.num_threads()) for p in (psutil.Process(), smp)])
        optim.step()
        schedule.step()
    model(torch.ones(1, 512)).sum().backward()  # the last snapshot is taken as one more step begins
    assert snap.drain(60)
    counts = {name: getattr(snap.statistics, name) for name in ("taken", "failed", "skipped", "protected")}
print(json.dumps({"seen": seen, "counts": counts}))
"""


@pytest.mark.needs("torch")
@sampled("steps", few=700, whole=2000)
def test_memory_is_flat_over_many_snapshots(steps: int) -> None:
    """A trainer and its SMP as users run them, with 4 MB of state. Resident memory includes the slots.

    What training allocates is returned at once; otherwise glibc would keep between 0 and 7 MB of freed gradients.
    """
    with Scratch("test") as scratch:
        environment = os.environ | {ARENA_ENV: str(scratch.path), "MALLOC_MMAP_THRESHOLD_": "65536"}
        try:
            done = python(STEADY, steps, env=environment, timeout=5 * DEADLINE_S)
            assert not list(scratch.path.iterdir()), "the job ended well and left its arena behind"
        finally:
            kill_smps(scratch.path)
    said = json.loads(done.stdout)
    assert said["counts"] == {"taken": steps, "failed": 0, "skipped": 0, "protected": steps - 1}  # not yet the last
    for who, seen in zip(("trainer", "SMP"), zip(*said["seen"], strict=True), strict=True):
        early, late = ([sample[0] for sample in part] for part in (seen[200:400], seen[-200:]))
        assert fmean(late) <= fmean(early) + TABLE_KIB, who
        before, after = (Counter(tuple(sample[1:]) for sample in part) for part in (seen[200:400], seen[-200:]))
        # What nearly all samples say: a thread may be at a file just then.
        assert before.most_common(1)[0][0] == after.most_common(1)[0][0], f"files and threads of the {who}"
        assert after.most_common(1)[0][1] > 180, after
