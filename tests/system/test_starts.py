"""Jobs in a crash loop: which ends count as the same, and when a job is not started again."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import InMemorySnapshot, Repeated
from holdfast.cli.status import gather
from holdfast.smp_daemon.shared.crash_loop import crash_loop_of, current_crash_loop
from holdfast.smp_daemon.shared.errors import ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_FAILURE
from holdfast.smp_daemon.shared.plain import decode_json, encode_json, from_plain
from holdfast.smp_daemon.shared.starts import KILLED, WELL, CrashLoop, Record, Start, TrainerEnd, failure_text
from holdfast.snapshot.resume.attempt import SameWorld
from holdfast.snapshot.resume.choice import StartOptions, check_repeats
from tests.scripts import completed
from tests.smp_kit import kill_smps
from tests.system.test_hook import half_a_step, small, train

counts = st.integers(0, MAX_COUNT)
failures = st.text(max_size=MAX_FAILURE)
streaks = st.builds(CrashLoop, counts, counts, counts, failures)
addresses = st.lists(st.tuples(st.just("10.0.0.1"), st.integers(1, 65535)), max_size=3).map(tuple)
starts = st.builds(Start, counts, counts, st.none() | streaks, newcomers=addresses)
ends = st.builds(TrainerEnd, counts, failures)
records = st.builds(Record, st.none() | starts, st.dictionaries(st.sampled_from(["dp0", "pp1-dp3", "x"]), ends))
CRASH = "ValueError: the loss is nan"
BEFORE = CrashLoop(3, 10, 12, CRASH)


def told(start: Start | None, *ends: dict[str, TrainerEnd]) -> list[Inventory]:
    """One inventory for each of `ends`."""
    return [Inventory(f"node{i}", "", 0, 0, record=Record(start, each)) for i, each in enumerate(ends)]


def one(end: TrainerEnd, before: CrashLoop | None = BEFORE, base: int = 10) -> CrashLoop | None:
    return crash_loop_of(told(Start(7, base, before), {"dp0": end}))


# ---------------------------------------------------------------------- which ends are the same


@pytest.mark.parametrize(
    ("end", "base", "times"),
    [
        pytest.param(TrainerEnd(12, CRASH), 10, 4, id="the same once more"),
        pytest.param(TrainerEnd(13, CRASH), 10, 4, id="a step more"),
        pytest.param(TrainerEnd(11, CRASH), 10, 4, id="a step less"),
        pytest.param(TrainerEnd(14, CRASH), 10, 1, id="two steps more"),
        pytest.param(TrainerEnd(10, CRASH), 10, 1, id="two steps less"),
        pytest.param(TrainerEnd(12, "ValueError: of another kind"), 10, 1, id="another failure"),
        pytest.param(TrainerEnd(12, KILLED), 10, 1, id="killed"),
        pytest.param(TrainerEnd(12, CRASH), 11, 1, id="a newer snapshot to go back to, which is progress"),
        pytest.param(TrainerEnd(12, CRASH), 9, 4, id="an older one, which is none"),
    ],
)
def test_an_end_is_counted_with_those_before_if_it_is_the_same(end: TrainerEnd, base: int, times: int) -> None:
    assert one(end, base=base) == CrashLoop(times, max(base, 10), end.step, end.failure)


def test_numbers_in_a_message_do_not_make_it_another() -> None:
    before = CrashLoop(1, 0, 5, "OSError: 0x7f31 at port 4711")
    found = one(TrainerEnd(5, "OSError: 0x8ab2 at port 4712"), before, base=0)
    assert found is not None and found.times == 2


def test_an_end_as_it_should_be_ends_the_streak() -> None:
    assert one(TrainerEnd(12, WELL)) is None


def test_who_cannot_say_it_was_killed() -> None:
    assert crash_loop_of(told(Start(7, 10), {}, {})) == CrashLoop(1, 10, 10, KILLED)


def test_who_only_lost_its_connection_was_not_killed_and_what_it_said_itself_stays() -> None:
    record = Record(
        Start(7, 10), {"dp0": TrainerEnd(12, KILLED), "dp1": TrainerEnd(11, KILLED), "dp2": TrainerEnd(11, CRASH)}
    )
    assert record.goes_on("dp0").ends == {"dp1": TrainerEnd(11, KILLED), "dp2": TrainerEnd(11, CRASH)}
    assert record.goes_on("dp2") == record == record.goes_on("dp3")


def test_without_any_start_there_is_nothing_to_tell() -> None:
    assert crash_loop_of([]) is None and crash_loop_of(told(None, {})) is None


def test_who_raised_tells_more_than_who_was_killed_and_that_more_than_an_echo() -> None:
    echo = TrainerEnd(12, "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:22000")
    killed, raised = TrainerEnd(12, KILLED), TrainerEnd(11, CRASH)
    start = Start(7, 10)
    everyone = told(start, {"dp0": echo, "dp1": killed}, {"dp2": raised})
    assert crash_loop_of(everyone) == CrashLoop(1, 10, 11, CRASH)
    without = told(start, {"dp0": echo, "dp1": killed})
    assert crash_loop_of(without) == CrashLoop(1, 10, 12, KILLED)
    alone = crash_loop_of(told(start, {"dp0": echo, "dp1": TrainerEnd(12, WELL)}))
    assert alone is not None and alone.failure == echo.failure


def test_newcomers_are_named_until_a_snapshot_of_their_start_is_protected() -> None:
    start = Start(7, 10, newcomers=(("10.0.0.9", 7000),))
    record = Record(start, {"dp0": TrainerEnd(12, CRASH)})
    assert record.protected(SnapshotId(6, 11)) == record
    assert record.protected(SnapshotId(7, 11)) == Record(Start(7, 10), record.ends)
    assert Record().protected(SnapshotId(7, 11)) == Record()


def test_only_the_newest_start_counts() -> None:
    old = told(Start(6, 3), {"dp0": TrainerEnd(4, "KeyError: 'x'")})
    assert crash_loop_of(old + told(Start(7, 10), {"dp1": TrainerEnd(12, CRASH)})) == CrashLoop(1, 10, 12, CRASH)


def test_a_running_job_shows_what_it_is_up_against_until_it_is_past_it() -> None:
    assert current_crash_loop(told(Start(7, 10, BEFORE), {})) == BEFORE
    assert current_crash_loop(told(Start(7, 11, BEFORE), {})) is None
    assert current_crash_loop(told(Start(7, 10, BEFORE), {"dp0": TrainerEnd(12, CRASH)})) == CrashLoop(4, 10, 12, CRASH)


@given(records)
def test_a_record_comes_back_from_json(record: Record) -> None:
    assert decode_json(Record, encode_json(record), "") == record


@given(st.recursive(st.none() | st.integers() | st.text(), lambda t: st.lists(t) | st.dictionaries(st.text(), t)))
def test_random_json_is_no_record(data: object) -> None:
    with pytest.raises(ProtocolError):
        from_plain(Record, {**data, "ends": 7} if isinstance(data, dict) else data)


def test_what_only_ends_the_program_is_no_failure() -> None:
    assert [failure_text(error) for error in (KeyboardInterrupt(), SystemExit(0), SystemExit(None))] == [WELL] * 3
    assert failure_text(SystemExit(3)) == "SystemExit: 3"
    assert len(failure_text(ValueError("x" * 9999))) == MAX_FAILURE


def test_a_failure_whose_text_cannot_be_sent_is_told_as_far_as_it_can() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    unreadable = os.fsdecode(b"/data/\xff.jpg")
    assert failure_text(ValueError(f"cannot read {unreadable}")) == r"ValueError: cannot read /data/\udcff.jpg"
    assert failure_text(Mute()) == "Mute"


# ---------------------------------------------------------------------- when a start is refused


def test_a_job_that_ended_too_often_is_refused_with_all_that_is_known() -> None:
    inventories = told(Start(7, 10, BEFORE), {"dp0": TrainerEnd(12, CRASH)})
    assert check_repeats(inventories, StartOptions(5)) == CrashLoop(4, 10, 12, CRASH)
    assert check_repeats(inventories, StartOptions(0)) is not None
    with pytest.raises(Repeated, match=r"4 times .* 12, .* step 10: .*nan.*=0"):
        check_repeats(inventories, StartOptions(4))


# ---------------------------------------------------------------------- real processes


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def train_until(end: int, error: BaseException | None, **options: int) -> int:
    """Train to step `end`, with every step protected, and raise `error`; return where it began."""
    model, optim = small()
    with InMemorySnapshot(model, optim, **options) as snap:  # type: ignore[arg-type]
        began = snap.step
        train(snap, model, optim, end - began)
        half_a_step(snap, model)
        if error is not None:
            raise error
    return began


def fail_at(step: int, error: BaseException, **options: int) -> None:
    with pytest.raises(type(error)):
        train_until(step, error, **options)


@pytest.mark.proves("crash-loops")
def test_the_same_failure_at_the_same_step_is_refused_until_it_is_allowed(arena: Path) -> None:
    fail_at(3, ValueError("the loss is nan"))  # restores nothing
    for _ in range(3):  # restores step 3, and gets no further
        fail_at(3, ValueError("the loss is nan"), max_repeats=3)
    for _ in range(2):  # a refusal is no attempt
        with pytest.raises(Repeated, match=r"3 times .* 3, .* step 3: .*nan"):
            train_until(3, None, max_repeats=3)
    [(_, overview)] = gather(arena)
    assert "3 times" in overview.repeats and "at step 3" in overview.repeats
    fail_at(6, ValueError("the loss is nan"), max_repeats=0)  # allowed, and gets further
    [(_, overview)] = gather(arena)
    assert "once at step 6" in overview.repeats
    assert train_until(6, None, max_repeats=1 + 1) == 6


def test_a_snapshot_that_a_rank_sees_not_to_fit_as_it_is_recovered_is_not_tried_again(
    arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another number of ranks, with an object whose class is not imported any more."""
    fail_at(3, ValueError("gone"))
    tries: list[object] = []

    def recover(attempt: object) -> None:
        tries.append(attempt)
        raise StateMismatch("the snapshot holds an object of no class")

    monkeypatch.setattr(SameWorld, "recover", recover)
    with pytest.raises(StateMismatch, match="of no class"):
        train_until(4, None)
    assert len(tries) == 1


def test_an_smp_that_died_meanwhile_still_knows(arena: Path) -> None:
    fail_at(0, ValueError("no data"))
    kill_smps(arena)
    with pytest.raises(Repeated, match=r"step 0: .*no data"):
        train_until(0, None, max_repeats=1)


DIES = """
import os, signal, torch
from holdfast import InMemorySnapshot
model = torch.nn.Linear(4, 3)
optim = torch.optim.Adam(model.parameters(), lr=0.1)
with InMemorySnapshot(model, optim):
    for _ in range(2):
        optim.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optim.step()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_is_counted_without_a_word_of_its_own(arena: Path) -> None:
    done = completed([sys.executable, "-c", DIES])
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(Repeated, match=r"once .* 2, .* step 0: killed"):
        train_until(3, None, max_repeats=1)


FAILS = """
import sys, torch, torch.distributed as dist
from holdfast import InMemorySnapshot
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 3)
optim = torch.optim.Adam(model.parameters(), lr=0.1)
try:
    with InMemorySnapshot(model, optim, max_repeats=2) as snap:
        for step in snap.steps(9):
            loss = model(torch.ones(2, 4)).sum()
            snap.drain(60)
            if step == 4 and dist.get_rank() == 1:
                raise ArithmeticError("rank 1 overflows")
            optim.zero_grad(); loss.backward(); dist.all_reduce(loss.detach()); optim.step()
except Exception as error:
    with open(f"{sys.argv[1]}/{dist.get_rank()}", "a") as out:
        print(f"{type(error).__name__}: {error}", file=out)
    raise
"""


@pytest.mark.cluster
@pytest.mark.slow  # all ranks decide from the same facts, as tested above
def test_all_ranks_refuse_together_under_torchrun(arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    launch = ["torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=x"]
    completed([sys.executable, "-m", *launch, *where, str(script), str(tmp_path)])
    for rank in range(2):
        *before, last = (tmp_path / str(rank)).read_text().splitlines()
        assert len(before) == 3  # the first of them got further than where it began, and so is no repeat
        assert last.startswith("Repeated: ") and "step 4" in last and "ArithmeticError: rank 1 overflows" in last
