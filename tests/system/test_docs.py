"""The documentation agrees with the code: its reference, examples, links and figures."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.main import make_parser
from holdfast.smp_daemon.shared import settings
from holdfast.smp_daemon.shared.settings import VARIABLES
from holdfast.snapshot.options import OptionsGiven
from tests.scripts import completed, python

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
VARIABLE = re.compile(r"\bHOLDFAST_[A-Z0-9_]*[A-Z0-9]\b")
TABLE = ROOT / "smp_daemon" / "shared" / "settings.py"
OUTSIDE = {".venv", ".git", "tests", "docs", "build", "results"}
"""Folders in which names of variables are not looked for."""


def sources() -> Iterator[Path]:
    """Files whose code may read an environment variable. Links are not followed."""
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in OUTSIDE and not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if path.suffix in {".py", ".c", ".sh", ".yaml", ".service"} and path != TABLE:
                yield path


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def test_the_code_names_the_settings_of_the_table_and_no_others() -> None:
    """By the variable's name, or by that of its entry."""
    texts = [path.read_text() for path in sources()]
    named = {name for text in texts for name in VARIABLE.findall(text)}
    assert named <= VARIABLES.keys()
    imported = "\n".join(text for text in texts if re.search(r"smp_daemon\.shared(\.settings)? import", text))
    entries = {each.variable: name for name, each in vars(settings).items() if isinstance(each, settings.Setting)}
    unread = [name for name in VARIABLES.keys() - named if not re.search(rf"\b{entries[name]}\.", imported)]
    assert unread == []


def test_pages_name_no_variable_that_there_is_not() -> None:
    for page in PAGES:
        named = {name for name in VARIABLE.findall(page.read_text()) if name != "HOLDFAST_TLS"}
        assert named <= VARIABLES.keys(), page


@pytest.mark.needs("torch")
def test_the_reference_is_what_the_code_says() -> None:
    """Generated in a separate process, as by ``make docs``."""
    code = "import runpy, json; print(json.dumps(runpy.run_path('docs/generate.py')['pages']()))"
    done = python(code, cwd=ROOT)
    for name, text in json.loads(done.stdout).items():
        assert (ROOT / "docs" / name).read_text() == text, f"{name} is out of date: make docs"


def test_the_reference_has_every_option_and_every_command() -> None:
    options = (ROOT / "docs/reference-python.md").read_text()
    for name in ("model", "optim", "scheduler", "extra", *OptionsGiven.__annotations__):
        assert re.search(rf"`{name}[`=]", options), name
    commands = (ROOT / "docs/reference-commands.md").read_text()
    for command in ("smp start", "chaos run", "drain", "export", "plan", "bench node"):
        assert f"## holdfast {command}\n" in commands
    for option in ("--persist-every", "--spares", "--on-hang", "--protect", "--dry-run"):
        assert f"`{option}" in commands
    assert set(VARIABLE.findall((ROOT / "docs/reference-environment.md").read_text())) == VARIABLES.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """A blank line within a table would show the rows below it as text."""
    lines = ["", *re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S).splitlines(), ""]
    begins = [i for i, line in enumerate(lines) if line.startswith("|") and not lines[i - 1].startswith("|")]
    assert [lines[i] for i in begins if not re.fullmatch(r"\|[ :|-]+\|", lines[i + 1])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_text_follows_a_comment_that_begins_a_line(page: Path) -> None:
    """CommonMark takes such a line for HTML, and shows its asterisks, backticks and links as they stand."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert re.findall(r"^ *(?:[*-] )?<!--[^>]*-->[^\n]*\S.*", text, re.M) == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_examples_are_python_and_import_what_there_is(page: Path) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
                assert node.module
                spec = importlib.util.find_spec(node.module)
                assert spec is not None and spec.origin is not None, node.module
                text = Path(spec.origin).read_text()
                for name in node.names:
                    assert re.search(rf"\b{name.name}\b", text), f"{node.module} has no {name.name}"


OWN = "snapshot|smp_daemon|ec|integrations|chaos|deploy|examples|holdfast|tests|tools|benchmarks|planner|megatron_lm"
"""Folders and modules of ours, as pages name them."""


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_are_there(page: Path) -> None:
    commands = (ROOT / "docs/reference-commands.md").read_text()
    text = page.read_text()
    assert set(re.findall(r"(?:`|\$ |&& )make ([a-z-]+)", text)) <= targets()
    for module in re.findall(rf"-m\s+((?:{OWN})(?:\.\w+)*)", text):
        assert importlib.util.find_spec(module) is not None, f"python -m {module}"
    if page.name != "CHANGELOG.md":  # which also names what has gone
        for command in re.findall(r"(?:`|\$ )holdfast (smp [a-z]+|chaos [a-z]+|bench [a-z]+|[a-z]+)", text):
            assert f"## holdfast {command}" in commands, f"holdfast {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(rf"`((?:{OWN}|docs)/[\w./-]*)`", text):
        assert any((base / path).exists() for base in (ROOT, ROOT / "holdfast")), path
    for script in re.findall(r"python ([\w./-]+\.py)\b", text):
        assert (ROOT / script).exists() or "/" not in script, script
    if page.name == "ARCHITECTURE.md":
        for name in set(re.findall(rf"`((?:{OWN})(?:\.\w+)+)`", text)) - {"holdfast.record"}:  # a leaf's name
            assert is_ours(name), name


def test_the_picture_of_a_snapshot_is_small_and_names_what_is_there() -> None:
    picture = (ROOT / "ARCHITECTURE.md").read_text().partition("## One snapshot")[2].split("```")[1]
    assert picture.count("┌") <= 8
    product = [
        ast.parse(path.read_text()) for room in ("snapshot", "smp_daemon") for path in (ROOT / room).rglob("*.py")
    ]
    there = {
        f"{thing.name}.{member.name}"
        for tree in product
        for thing in tree.body
        if isinstance(thing, ast.ClassDef)
        for member in thing.body
        if isinstance(member, ast.FunctionDef)
    }
    named = re.findall(r"[A-Z]\w+\.\w+", picture)
    assert len(named) > 8
    assert set(named) <= there


def options() -> dict[str, set[str]]:
    """The options of each command, aliases included."""
    found: dict[str, set[str]] = {}

    def look(name: str, parser: argparse.ArgumentParser) -> None:
        found[name] = {option for action in parser._actions for option in action.option_strings}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, inner in action.choices.items():
                    look(f"{name} {word}", inner)

    look("holdfast", make_parser())
    return found


def test_options_that_pages_give_to_commands_are_there() -> None:
    known, compared = options(), 0
    for page in (page for page in PAGES if not page.name.startswith("reference-")):  # those are generated
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for found in re.finditer(r"holdfast ((?:smp|chaos|bench) [a-z]+|[a-z-]+)([ \t][^\n`#]*)?", text):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", (found[2] or "").split(" -- ")[0]):
                if f"holdfast {found[1]}" in known:
                    assert option in known[f"holdfast {found[1]}"], f"{page.name}: {found[0]}"
                    compared += 1
    assert compared > 50


def is_ours(name: str) -> bool:
    """Whether a dotted name is a file that pages name by its ending, a module, or in the text of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        for base in (ROOT, ROOT / "holdfast"):
            path = base.joinpath(*parts[:end])
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if file.is_file():
                inner = path.glob("*.py") if path.is_dir() else [file]
                found = "\n".join(each.read_text() for each in inner)
                return all(re.search(rf"\b{part}\b", found) for part in parts[end:])
    return False


def test_make_lists_every_target() -> None:
    done = completed(["make", "-s"], cwd=ROOT, check=True)
    listed = [line.split() for line in done.stdout.splitlines()]
    assert {words[1] for words in listed} == targets()
    assert all(len(words) > 2 for words in listed)
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        asked = set(re.findall(r"\bmake ([a-z-]+)", workflow.read_text().partition("jobs:")[2]))
        assert asked and asked <= targets(), workflow


AROUND = """
import os, signal, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
optim = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
loader = DataLoader(TensorDataset(torch.randn(60, 4), torch.randint(3, (60,))), batch_size=4, shuffle=True)
n_epochs, calls = 2, 0

def loss_of(y, target):
    global calls
    calls += 1
    assert snap.drain(20)  # at each step: or one is skipped where no slot is free yet
    if calls == int(os.environ["STOP"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(y, target)

{}
print(calls, [p.sum().item().hex() for p in model.parameters()])
"""


@pytest.mark.needs("torch")
@pytest.mark.proves("one-name", "plain-loader")
def test_the_example_of_the_readme_resumes_bit_for_bit(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code exactly as in the README, with a plain shuffled DataLoader; killed in its second epoch."""
    code = AROUND.format(blocks(ROOT / "README.md", "python")[0])
    compile(code, "README.md", "exec")

    def run(job: str, stop: int) -> tuple[int, str]:
        environment = os.environ | {"HOLDFAST_JOB": job, "STOP": str(stop)}
        command = [sys.executable, "-c", code]
        done = completed(command, env=environment)
        return done.returncode, done.stdout or done.stderr

    alone = run("alone", 0)
    assert alone[0] == 0, alone[1]
    assert run("killed", 20)[0] == -9
    again = run("killed", 0)
    assert again[0] == 0, again[1]
    (calls, weights), (all_calls, expected) = again[1].split(" ", 1), alone[1].split(" ", 1)
    assert int(all_calls) == 30 and int(calls) in (11, 12), "it did not resume where it was"
    assert weights == expected


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = completed(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / "site" / f"{page.stem}.html").is_file()
