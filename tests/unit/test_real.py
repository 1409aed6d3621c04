"""Parts of ``make real``: the comparison finds one bit, the driver ends what hangs, and absent packages are named."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tools.real import programs
from tools.real.comparison import Note, compare, read
from tools.real.driver import Kill, drive, plan
from tools.real.edits import Edit, apply, difference
from tools.real.environments import Absent, checkout
from tools.real.probe import digest
from tools.real.registry import RUNS
from tools.real.report import markdown, report
from tools.real.running import Result, execute

STEPS = 12


def whole(steps: int = STEPS) -> list[Note]:
    """The notes of an undisturbed process."""
    found: list[Note] = []
    for step in range(steps):
        found += [("loss", ((step + 1) / 7).hex()), ("step", {"optimizer": f"o{step}", "generator torch": f"g{step}"})]
        found += [("eval", f"e{step}")] if step % 5 == 4 else []
    return [*found, ("final", {"weights": "w", "generator torch": "g"})]


def at(step: int) -> int:
    """The index in `whole` at which a step begins."""
    return 2 * step + step // 5


def killed(*cuts: tuple[int, int]) -> list[list[Note]]:
    """The notes of successive processes. For each cut (end, step) one ends before note `end` of `whole`, and the next
    begins with `step`."""
    begins = [0, *(at(step) for _, step in cuts)]
    ends = [*(end for end, _ in cuts), None]
    return [whole()[begin:end] for begin, end in zip(begins, ends, strict=True)]


CUT = killed((9, 3), (at(7) + 1, 6), (at(10), 9))


def test_a_run_that_was_resumed_three_times_is_the_same() -> None:
    verdict = compare({0: [whole()], 1: [whole()]}, {0: CUT, 1: CUT}, 3)
    assert verdict.difference == ""
    assert verdict.resumed == [3, 6, 9]
    assert verdict.again == 3
    assert (verdict.losses, verdict.final) == (2 * STEPS, 4)


@pytest.mark.parametrize(("process", "note"), [(0, 0), (1, 2), (2, 4), (3, 1)])
def test_one_flipped_bit_in_one_note_of_one_rank_is_found(process: int, note: int) -> None:
    spoilt = [list(notes) for notes in CUT]
    kind, value = spoilt[process][note]
    if kind == "loss":
        spoilt[process][note] = (kind, (float.fromhex(value) * (1 + 2**-52)).hex())
    else:
        spoilt[process][note] = (kind, {**value, "optimizer": "other"})
    verdict = compare({0: [whole()], 1: [whole()]}, {0: CUT, 1: spoilt}, 3)
    assert verdict.difference.startswith(f"rank 1, process {process + 1}: ")
    assert ("optimizer differ" if kind == "step" else "loss 0x") in verdict.difference


def test_what_else_makes_runs_differ_is_named() -> None:
    plain = {0: [whole()]}

    def said(processes: list[list[Note]], kills: int = 1) -> str:
        return compare(plain, {0: processes}, kills).difference

    [first, second] = killed((9, 3))
    other = [*second[:-1], ("final", {"weights": "x", "generator torch": "g"})]
    assert "weights differ" in said([first, other])
    assert said([first, second[2:]]) == ""  # begins with the interrupted step
    assert said([first, whole()[at(5) :]]).startswith("rank 0, process 2: loss")  # a step is missing
    assert "24 of 26 notes" in said([first, [*second[:-3], second[-1]]])
    assert "1 notes too many" in said([first, [*second[:-1], ("loss", "0x1p+0"), second[-1]]])
    assert said([first, whole()]).endswith("nothing was restored")
    assert "did not end" in said([first, second[:-1]])
    assert "started 3 times" in said([first, second, second], 1)
    assert "ranks [] were killed" in compare(plain, {}, 1).difference
    spoilt: list[Note] = [("loss", "nan"), *whole()[1:]]
    assert "no numbers" in compare({0: [spoilt]}, {0: [first, second]}, 1).difference


def test_notes_are_read_by_rank_and_in_order(tmp_path: Path) -> None:
    for name, value in (("rank1-0", 1), ("rank0-0", 2), ("rank0-1", 3), ("rank0-10", 4)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(["loss", value]) + "\n")
    assert read(tmp_path) == {0: [[("loss", 2)], [("loss", 3)], [("loss", 4)]], 1: [[("loss", 1)]]}


def test_what_a_program_left_is_compared(tmp_path: Path) -> None:
    for name, losses, progress in (("plain", "loss 1 0x1\nloss 2 0x2\n", "start\n1\n2\n"), ("killed", "", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "losses.0").write_text(losses)
        (tmp_path / name / "state.0").write_text("model 12\n")
        (tmp_path / name / "progress.0").write_text(progress)
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    (killed / "losses.0").write_text("loss 1 0x1\nloss 2 0x2\nloss 2 0x2\n")
    (killed / "progress.0").write_text("start\n1\n2\nstart\n2\n")
    assert programs.compare(plain, killed) == ("", [1], 1, 2, 1)
    (killed / "losses.0").write_text("loss 1 0x1\nloss 2 0x2\nloss 2 0x3\n")
    assert programs.compare(plain, killed).difference.startswith("losses.0: loss 2 was done")
    (killed / "losses.0").write_text("loss 1 0x1\n")
    (killed / "state.0").unlink()
    assert programs.compare(plain, killed).difference.split("; ") == [
        "losses.0: loss 2 differs",
        "state.0: model differs",
    ]


def test_a_digest_sees_every_bit_and_no_address() -> None:
    one = {"a": torch.zeros(3), "b": [1.0, None, object()]}
    assert digest(one) == digest({"b": [1.0, None, object()], "a": torch.zeros(3)})
    spoilt = torch.zeros(3)
    spoilt.view(torch.int32)[1] = 1
    assert digest({**one, "a": spoilt}) != digest(one)
    assert digest({**one, "b": [1.0 + 2**-52, None, object()]}) != digest(one)


# ---------------------------------------------------------------------- the driver

TRAINER = """
import os, sys, time
pipe = os.open(os.environ["REAL_PIPE"], os.O_WRONLY)
def tell(kind): os.write(pipe, f"{kind} 0 {os.getpid()}\\n".encode())
tell("start")
for step in range(int(sys.argv[1])):
    time.sleep(0.005)
    tell("step")
    if step % 4 == 3: tell("eval")
if sys.argv[2] == "hang": time.sleep(600)
tell("end")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program that reports as trainers do."""
    (tmp_path / "work").mkdir()
    (tmp_path / "trainer.py").write_text(TRAINER)
    return tmp_path


def command(folder: Path, steps: int, how: str = "") -> list[str]:
    return [sys.executable, "-S", str(folder / "trainer.py"), str(steps), how]


def test_processes_are_killed_and_started_again(folder: Path) -> None:
    kills = [Kill(0, "step", 3, 0.5), Kill(0, "eval", 1, 0.0)]
    outcome = drive(command(folder, 200), dict(os.environ), folder, kills, again=True, deadline_s=60)
    assert (outcome.status, outcome.hung) == (0, False)
    assert [each.partition(",")[0] for each in outcome.killed] == ["rank 0", "rank 0"]
    assert outcome.killed[1].endswith("after an evaluation")
    assert not (folder / "told").exists()


def test_a_run_that_hangs_ends_by_its_deadline(folder: Path) -> None:
    began = time.monotonic()
    outcome = drive(command(folder, 2, "hang"), dict(os.environ), folder, [], again=False, deadline_s=1.0)
    assert (outcome.status, outcome.hung) == (None, True)
    assert time.monotonic() - began < 30


def test_a_run_that_ends_before_its_kill_is_left_alone(folder: Path) -> None:
    late = [Kill(0, "step", 99, 0.0)]
    outcome = drive(command(folder, 2), dict(os.environ), folder, late, again=True, deadline_s=60)
    assert (outcome.status, outcome.killed) == (0, [])


def test_kills_come_from_the_seed_and_fit_into_the_run() -> None:
    assert plan(1, 3, 4, 40, 0) == plan(1, 3, 4, 40, 0) != plan(2, 3, 4, 40, 0)
    for seed in range(50):
        made = plan(seed, 3, 4, 40, 8)
        assert sum(kill.times for kill in made[:-1]) < 40 and all(0 <= kill.rank < 4 for kill in made)
        assert made[-1].after == "eval"
    with pytest.raises(ValueError, match=r"11 steps .* 3 kills: .* 12"):
        plan(1, 3, 1, 11, 0)


# ---------------------------------------------------------------------- scripts of other people

LOOP = """
def run():
    for step in range(3):
        if step:
            print(step)
        done()
    return step
"""


def test_lines_are_put_in_where_the_script_has_them_once() -> None:
    edit = Edit("x.py", "for step in range(3):", "with snap:\n    n = 3", until="done()")
    made = apply(LOOP, edit)
    inner = textwrap.indent(
        "    for step in range(3):\n        if step:\n            print(step)\n        done()\n", "    "
    )
    assert made == f"\ndef run():\n    with snap:\n        n = 3\n{inner}    return step\n"
    assert difference(LOOP, apply(LOOP, Edit("x.py", "done()", "done(1)")), "x.py") == (
        "@@ -5,3 +5,3 @@\n             print(step)\n-        done()\n+        done(1)\n     return step"
    )
    with pytest.raises(ValueError, match=r"x\.py .*'missing\(\)' 0 times"):
        apply(LOOP, Edit("x.py", "missing()", ""))
    with pytest.raises(ValueError, match=r"'done\(\)' 2 times"):
        apply(LOOP + LOOP, Edit("x.py", "done()", ""))


def test_a_framework_that_is_absent_is_skipped_by_name(tmp_path: Path) -> None:
    with pytest.raises(Absent, match=r"nanoGPT .*REAL="):
        checkout(None, "nanoGPT")
    result = execute(next(run for run in RUNS if run.name == "nanogpt"), tmp_path, {}, 1)
    assert (result.outcome, result.said) == ("skipped", f"nanoGPT is not in {tmp_path}")
    said = markdown(report([result], "2026-01-01T00:00:00+00:00", 1))
    assert f"## Skipped\n\n* nanogpt: {result.said}\n" in said


def test_a_report_says_what_was_killed_and_which_lines_are_ours() -> None:
    done = Result(
        "x", "X", "its script", "docs/loops.md", "exact", versions={"X": "1.2"}, steps=9, kills=["rank 0, 2 steps"],
        resumed=[2], losses=9, final=3, lines="+with snap:",
    )  # fmt: skip
    failed = Result("y", "Y", "its script", "docs/loops.md", "differs", said="rank 0: at the end weights differ")
    found = report([done, failed], "2026-01-01T00:00:00+00:00", 1)
    said = markdown(found)
    assert "1 of 2 are exact" in said
    assert "| x | X: its script | 1 | 9 | yes | 9 | 2 | 0 | 0 |" in said and "* killed: rank 0, 2 steps" in said
    assert "```diff\n+with snap:\n```" in said and "X 1.2." in said
    assert "| **no** |" in said and "```text\nrank 0: at the end weights differ\n```" in said
    failed.outcome = "exact"
    again = report([failed], "2026-01-02T00:00:00+00:00", 1, found)["runs"]
    assert [(run["name"], run["outcome"]) for run in again] == [("x", "exact"), ("y", "exact")]


def test_every_run_has_a_name_a_page_and_a_place() -> None:
    names = [run.name for run in RUNS]
    assert len(set(names)) == len(names)
    for run in RUNS:
        assert (Path(__file__).parents[2] / run.page).is_file(), run.name
        assert run.checkout or run.package, run.name
        assert run.lines or run.launcher or run.program, run.name
