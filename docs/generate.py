"""Generates the reference pages of docs/ from the code: ``python docs/generate.py``, or ``make docs``.

The pages are committed, because most people read docs/ unbuilt. `tests/system/test_docs.py` fails if a page is out of
date.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
from collections import ChainMap, Counter
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
NOTE = "<!-- Written by docs/generate.py out of the code: `make docs`. Do not edit. -->\n\n"


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text)


def pages() -> dict[str, str]:
    """The text of each reference page, and of pages of which parts are generated, by path from this folder."""
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        del os.environ[name]  # they would change the defaults of commands
    sys.path.insert(0, str(ROOT))
    made = {"reference-python.md": python, "reference-commands.md": commands, "reference-environment.md": environment}
    made |= {"proof.md": proof, "support.md": support}
    found = {name: NOTE + "\n\n".join(part for part in make() if part).rstrip() + "\n" for name, make in made.items()}
    figures = importlib.import_module("benchmarks.stall_figures")
    for name, folder in (("../README.md", "benchmarks/results"), ("figures.md", "../benchmarks/results")):
        found[name] = figures.filled((DOCS / name).read_text(), folder)
    return found


# ---------------------------------------------------------------------- support


RESULTS = ROOT / "benchmarks" / "results"
SUPPORT = "tests.proof.matrix.kinds"


def support() -> Iterator[str]:
    yield "# What it was run with"
    yield from _scripts()
    yield from _jobs()
    yield (
        "With another release of megatron-core, a job warns that it was never tried. What would come back wrong is "
        "refused by name before the first step."
    )
    yield from _kinds()


def _kinds() -> Iterator[str]:
    """The table of supported features of megatron-core."""
    table = importlib.import_module(SUPPORT)
    exact = _exact_cells()
    yield "## Megatron, kind by kind"
    yield "`tests/proof/matrix/kinds.py` has the jobs and tests behind each line."
    meant = {
        table.SupportStatus.EXACT: "killed and restored as above, with megatron-core's own code",
        table.SupportStatus.STRUCTURES: "the same, or by tests, with stand-ins for what megatron-core needs of "
        "Transformer Engine or of a GPU",
        table.SupportStatus.DEVICE: "not run so far",
        table.SupportStatus.REFUSED: "a job that has it ends before its first step, and is told what to leave out",
    }
    for status, meaning in meant.items():
        yield f"**{status}**: {meaning}."
        kinds = [kind for kind in table.KINDS if kind.status == status]
        for releases in sorted(dict.fromkeys(_releases(kind, exact) for kind in kinds), key=bool):
            if releases:
                yield f"With megatron-core {releases}:"
            yield "\n".join(_kind(kind) for kind in kinds if _releases(kind, exact) == releases)


def _releases(kind: Any, exact: dict[str, set[str]]) -> str:
    """Those with which all jobs of a kind were exact."""
    return ", ".join(name for name, cells in sorted(exact.items()) if kind.cells and cells.issuperset(kind.cells))


def _kind(kind: Any) -> str:
    option = f"`{kind.option}`" if kind.option.startswith("--") else kind.option
    return f"* {kind.name}{f' ({option})' if option else ''}{f': {kind.note}' if kind.note else ''}"


def _exact_cells() -> dict[str, set[str]]:
    """The cells that a committed report found exact, by release of megatron-core."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("matrix-*.json"):
        report = json.loads(path.read_text())
        cells = found.setdefault(report["versions"]["megatron-core"], set())
        ran = (each for each in report["verdicts"] if not each["difference"] and not each.get("skipped"))
        cells.update(each["cell"]["name"] for each in ran)
    return found


def _scripts() -> Iterator[str]:
    """The newest result of each script in the reports of ``make real``."""
    newest: dict[str, tuple[str, str]] = {}
    for path in sorted(RESULTS.glob("real-*.json")):
        found = json.loads(path.read_text())
        for run in found["runs"]:
            if run["outcome"] != "skipped":
                of = run["versions"]  # Python, torch, and then the framework if that is not torch
                release = list(of.values())[2 if len(of) > 2 else 1]
                exact = "" if run["outcome"] == "exact" else ", **not exact**"
                what = f"[{run['framework']}]({run['page'].removeprefix('docs/')}) | {release} | {run['what']}"
                where = f"{_when(path, found)}, Python {of['Python']}, torch {of['torch']}"
                newest[run["name"]] = where, f"| {what}{exact} | {run['ranks']} |"
    yield "## Scripts of others"
    yield (
        "`make real REAL=...` trains each undisturbed and without holdfast, and again with its documented lines, while "
        "three trainers are killed at drawn instants. Unless a line says *not exact*, every loss and evaluation, "
        "parameters, optimizer state and generators after every step, and all state at the end are the same on all "
        "ranks to the last bit. On CPUs."
    )
    head = ["| framework | release | what was run | ranks |", "|---|---|---|---:|"]
    for where in dict.fromkeys(where for where, _ in newest.values()):
        yield f"{where}:"
        yield "\n".join([*head, *(row for each, row in newest.values() if each == where)])


def _when(path: Path, found: dict[str, Any]) -> str:
    """The date, linked to the report, which has the machine."""
    return f"[{found['when'][:10]}](../benchmarks/results/{path.with_suffix('.md').name})"


def _jobs() -> Iterator[str]:
    """A row for each framework in each report of the matrix, newest first."""
    yield "## Kinds of jobs"
    yield (
        "Each line is a run of `make matrix`: every kind of job was trained undisturbed, and again with a trainer and "
        "then a whole node killed in the middle of steps. On CPUs; [what ran on a GPU](gpu.md)."
    )
    rows = []
    for path in sorted(RESULTS.glob("matrix-*.json"), reverse=True):
        found = json.loads(path.read_text())
        versions = found["versions"]
        of_megatron = [".gpt:" in each["cell"]["job"] for each in found["verdicts"]]
        for name, kind in (("megatron-core", True), ("PyTorch: one process, DDP, FSDP2, ZeRO-1", False)):
            ran = [each for each, mega in zip(found["verdicts"], of_megatron, strict=True) if mega is kind]
            chosen = [each for each in ran if not each.get("skipped")]
            if not chosen:
                continue
            exact = sum(not each["difference"] for each in chosen)
            release = versions["megatron-core"] if kind else versions["torch"]
            on = f"Python {versions['Python']}, torch {versions['torch']}, {_when(path, found)}"
            rows.append(f"* {name} {release}: {exact} of {len(chosen)} exact. {on}")
    yield "\n".join(rows)


# ---------------------------------------------------------------------- proof

WORDS_QUOTED = 8


def proof() -> Iterator[str]:
    promises = importlib.import_module("tests.promises")
    broken = importlib.import_module("tests.proof.broken_builds")
    yield "# What proves it"
    yield (
        "How each promise of the README and of these pages begins, and the tests that fail if it is not kept. "
        "`make proof` runs them and prints the results."
    )
    found = promises.proofs()
    for page in dict.fromkeys(promise.page for promise in promises.PROMISES.values()):
        link = page.removeprefix("docs/") if page.startswith("docs/") else f"../{page}"
        yield f"## [{page}]({link})"
        rows = [(name, promise) for name, promise in promises.PROMISES.items() if promise.page == page]
        yield "\n".join(_row(promise, found[name]) for name, promise in rows)
    yield "## Builds that are broken on purpose"
    yield (
        "Each of these builds is wrong in one place, and must be noticed by the check that it names; every check has "
        "one. Training loops are noticed by their outcome."
    )
    yield "\n".join(["| where | builds | checks |", "|---|---:|---|", *broken.rows()])


def _row(promise: Any, tests: list[Any]) -> str:
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.file, []).append(test.test)
    proofs = (f"`{file}` {', '.join(names)}" for file, names in by_file.items())
    return f"* {_beginning(promise.text.replace('|', ''))}<br>{'; '.join(proofs)}"


def _beginning(text: str) -> str:
    """Enough of a promise to find it on its page; code is left whole."""
    words = re.findall(r"(?:`[^`]*`|\S)+", text)
    return " ".join(words) if len(words) <= WORDS_QUOTED else f"{' '.join(words[:WORDS_QUOTED]).rstrip(',;:')} …"


# ---------------------------------------------------------------------- Python


def python() -> Iterator[str]:
    holdfast = importlib.import_module("holdfast")
    snapshot = holdfast.InMemorySnapshot
    batches = importlib.import_module("holdfast.integrations.batches")
    yield "# Python interface"
    yield "What `from holdfast import ...` gives. Frameworks have [pages of their own](start.md#frameworks)."
    yield "## `InMemorySnapshot`"
    yield from document(snapshot, importlib.import_module("holdfast.snapshot.options").Options)
    yield "## While a job runs"
    yield "Methods and attributes of the object that `with InMemorySnapshot(...) as snap:` gives."
    for name, member in inspect.getmembers(snapshot):
        if not name.startswith("_") and isinstance(member, FunctionType | property) and name not in HOOKED:
            yield f"### `snap.{name}{'' if isinstance(member, property) else signature(member)}`"
            yield from document(member.fget if isinstance(member, property) else member, with_defaults=False)
    around = vars(sys.modules[snapshot.__mro__[1].__module__])
    yield "### What `snap.data` takes"
    yield "[Loops](loops.md#say-where-a-step-begins) says which sources resume where they were."
    yield from document(around["Data"].__init__, with_defaults=False, with_errors=False)
    for name, kind in (("statistics", "Statistics"), ("restored", "Restored")):
        yield f"### What `snap.{name}` holds"
        yield from document(around[kind])
    yield "## Other functions"
    for module, name in [
        (holdfast, "prefetch"),
        (holdfast, "register"),
        *((batches, each) for each in public(batches)),
    ]:
        yield f"### `{module.__name__}.{name}`"
        yield from document(getattr(module, name))
    yield from integrations()
    yield "## Errors"
    errors = [getattr(holdfast, name) for name in holdfast.__all__]
    errors = [each for each in errors if isinstance(each, type) and issubclass(each, Exception)]
    yield "\n".join(f"* `{each.__name__}`: {cell(each.__doc__)}" for each in errors)


HOOKED = {"before_step", "after_step", "on_forward", "on_backward"}
"""Methods that are public only because hooks of optimizers and modules call them."""

VARIABLE = re.compile(r"Default\s+``HOLDFAST_")
"""What is said of an argument that is also a variable of the environment, and is described there."""

INNER = {
    "notes",
    "loop",
    "inputs",
    "began",
    "rewind",
    "clock",
    "held",
    "mark",
    "begin",
    "heartbeat",
    "source, ahead, exact",
    "over",
    "run",
    "protected",
    "only_sealed",
    "order_repairs",
    "earlier",
}
"""Arguments and attributes that only the hook uses, or that are described elsewhere on the page."""


INTEGRATIONS = {
    "megatron_lm": ("megatron-lm.md", "protect", "InMemoryCheckpointManager"),
    "megatron_bridge": ("megatron-lm.md#megatron-bridge", "BridgeCallback"),
    "lightning": ("lightning.md", "InMemoryCallback"),
    "huggingface": ("hugging-face.md", "protect"),
    "accelerate": ("hugging-face.md#accelerate", "protect"),
    "dcp": ("checkpoints.md#dcp", "MemoryWriter", "MemoryReader"),
    "deepspeed": ("checkpoints.md#deepspeed", "MemoryCheckpointEngine"),
    "torchft": ("checkpoints.md#torchft", "MemoryTransport"),
    "torchtitan": ("fsdp2.md#torchtitan", "in_memory"),
    "ray.nodes": ("ray.md#node-agents", "start", "status", "stop"),
    "ray.worker_group": ("ray.md#a-worker-group", "WorkerGroup"),
    "ray.train": ("ray.md#ray-train", "GiveUp"),
    "inprocess": ("restarts.md#survivors-keep-their-processes", "survive", "abandon_process_groups", "forget"),
}
"""For each module of holdfast.integrations its guide, and what users call of it."""
CALLED = {"close", "is_empty", "load", "load_data", "on_train_step_start", "run", "shutdown", "snapshot"}
"""Their methods that users call; a framework calls the others."""


def integrations() -> Iterator[str]:
    """Parsed, not imported: their frameworks need not be installed. A docstring's first paragraph; guides have all."""
    yield "## Integrations"
    for module, (guide, *names) in INTEGRATIONS.items():
        tree = ast.parse((ROOT / "integrations" / f"{module.replace('.', '/')}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
                shown = f"holdfast.integrations.{module.removesuffix('.nodes').removesuffix('.worker_group')}"
                yield f"### `{shown}.{node.name}{_arguments(node, _constants(tree))}`"
                yield from _outline(ast.get_docstring(node) or "", guide)
                called = {each: ast.get_docstring(each) for each in node.body if isinstance(each, ast.FunctionDef)}
                yield "\n".join(
                    f"* `{each.name}{'' if each.decorator_list else _arguments(each, {})}`: "
                    f"{cell(said.partition(SECTION)[0])}"
                    for each, said in called.items()
                    if each.name in CALLED and said
                )


SECTION = "\n\n"


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    found = (each for each in tree.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant))
    return {target.id: each.value for each in found for target in each.targets if isinstance(target, ast.Name)}


def _arguments(node: ast.FunctionDef | ast.ClassDef, constants: dict[str, ast.expr]) -> str:
    """A call's arguments without types, and defaults as values; for a class those of its constructor."""
    if isinstance(node, ast.ClassDef):
        made = (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
        return _arguments(found, constants) if (found := next(made, None)) else "()"
    bare = copy.deepcopy(node.args)
    for each in (*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg):
        if each is not None:
            each.annotation = None
    bare.args = [each for each in bare.args if each.arg not in ("self", "cls")]
    bare.kw_defaults = [constants.get(ast.unparse(each), each) if each else None for each in bare.kw_defaults]
    return f"({ast.unparse(bare)})"


def _outline(docstring: str, guide: str) -> Iterator[str]:
    """The first paragraph with a link to the guide, and what is said of arguments and errors."""
    text, *sections = re.split(r"^(Args|Attributes|Returns|Raises):\n", docstring, flags=re.M)
    yield f"{prose(text.partition(SECTION)[0])} [Guide]({guide})."
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = [each.split(":", 1) for each in re.split(r"\n(?=\S)", textwrap.dedent(body).strip())]
        if title == "Args":
            yield "\n".join(entry(names, meaning, {}) for names, meaning in entries if names != "options")
        elif title == "Raises":
            yield f"Raises {', '.join(f'`{names}`' for names, _ in entries)}."


def public(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def signature(member: Any) -> str:
    names = [str(p.replace(annotation=p.empty)) for n, p in inspect.signature(member).parameters.items() if n != "self"]
    return f"({', '.join(names)})"


def document(thing: Any, *more: Any, with_defaults: bool = True, with_errors: bool = True) -> Iterator[str]:
    """A docstring as Markdown; `with_defaults`: arguments are shown with theirs, some of which `more` has."""
    text, *sections = re.split(r"^(Args|Attributes|Returns|Raises):\n", inspect.getdoc(thing) or "", flags=re.M)
    yield prose(text)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = [each.split(":", 1) for each in re.split(r"\n(?=\S)", textwrap.dedent(body).strip())]
        if title == "Returns" or any(len(each) != 2 for each in entries):
            yield f"{title}: {prose(textwrap.dedent(body))}"
        elif title in ("Args", "Attributes"):
            signatures = [inspect.signature(each).parameters for each in (thing, *more)]
            defaults = dict(ChainMap(*map(dict, signatures))) if title == "Args" and with_defaults else {}
            variables = [names for names, meaning in entries if VARIABLE.search(meaning)]
            kept = [each for each in entries if each[0] not in {*INNER, *variables}]
            yield "\n".join(entry(names, meaning, defaults) for names, meaning in kept)
            if variables:
                yield (
                    f"{', '.join(f'`{each}`' for each in variables)}: as the [variables](reference-environment.md) "
                    "`HOLDFAST_...` of these names, which are the defaults."
                )
        elif with_errors:
            yield "\n".join(f"* Raises `{names}`: {cell(meaning)}" for names, meaning in entries)


def entry(names: str, meaning: str, defaults: Any) -> str:
    """A line of a list: what is meant, with its default if that is known."""
    shown = []
    for name in (each.strip() for each in names.split(",")):
        default = defaults[name].default if name in defaults else inspect.Parameter.empty
        text = repr(default).replace("<factory>", "None")  # it comes from the environment
        shown.append(f"`{name}`" if default is inspect.Parameter.empty else f"`{name}={text}`")
    return f"* {', '.join(shown)}: {cell(meaning)}"


def prose(text: str) -> str:
    """Convert reST's ``code`` and ``::`` to Markdown, and names of pages to links."""
    text = text.replace("``", "`")
    code = re.compile(r"^::\n\n((?:    .*\n|\n)+)", re.M)
    text = code.sub(lambda m: f"```python\n{textwrap.dedent(m[1]).strip()}\n```\n", text + "\n")
    return re.sub(r"(?<![\w`/])docs/([\w-]+\.md)", r"[\1](\1)", text).strip()


def cell(text: str | None) -> str:
    """Text for a table cell: on one line, with < escaped outside of code."""
    parts = " ".join(prose(text or "").split()).replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


# ---------------------------------------------------------------------- commands

STATUSES = (
    (0, "all is well"),
    (1, "it is not: something differs, was lost or failed"),
    (2, "refused: wrong usage, a wrong setting, a path that cannot be used, or not now"),
    (3, "there is no such job, node or SMP here"),
    (4, "an SMP does not answer, or refuses this command: the message says what is lacking"),
    ("130, 143, 129", "ended by Ctrl-C, SIGTERM, a closed terminal"),
)


def commands() -> Iterator[str]:
    parser = importlib.import_module("holdfast.cli.main").make_parser()
    yield "# Commands"
    yield "`holdfast COMMAND --help` says the same."
    yield (
        "Sizes, times and rates are a number and a unit: `64GB` or `60GiB`; `800ms`, `90s`, `5min`, `36h` or `1000d`; "
        "`2GB/s`. A number without one is refused, but for 0. So it is in [variables](reference-environment.md)."
    )
    yield "## How a command ends"
    yield "\n".join(["| exit status | |", "|---:|---|", *(f"| {status} | {meaning} |" for status, meaning in STATUSES)])
    yield (
        "An error is one line on standard error, `holdfast: what: limit: fix`. With `--json FILE` it is also written "
        "where the result would have been, `-` being standard output, as one object, the same of every command:"
    )
    yield '```json\n{"error": {"kind": "NotFound", "message": "job my-run: there is no arena ...", "status": 3}}\n```'
    yield (
        "`kind` is the name of a Python error. Ctrl-C, SIGTERM and a closed terminal end all that a command started, "
        "and remove its files. What one that was killed with SIGKILL left in shared memory, `holdfast gc` removes."
    )
    found = list(leaves(parser))
    lines = {leaf.prog: [option(leaf, each) for each in leaf._actions if each.dest != "help"] for leaf, _ in found}
    times = Counter(line for own in lines.values() for line in own)
    shared = {line: line.partition("`:")[0].removeprefix("* `") for line in times if times[line] > 1}
    yield f"## {SHARED}"
    yield "The commands that have them name them at their end."
    yield "\n".join(sorted(shared))
    for leaf, summary in found:
        yield f"## {leaf.prog}"
        yield cell(leaf.description or f"{summary[0].upper()}{summary[1:]}.")
        settings = [line.partition("`:")[0].removeprefix("* `") for line in lines[leaf.prog] if line.endswith(SETTING)]
        if settings:
            options = ", ".join(f"`{each}`" for each in settings)
            yield f"{options}: the [variables](reference-environment.md) of the same names."
        yield "\n".join(line for line in lines[leaf.prog] if line not in shared and not line.endswith(SETTING))
        if others := [f"`{shared[line]}`" for line in lines[leaf.prog] if line in shared]:
            yield f"Also [{', '.join(others)}](#{SHARED.lower().replace(' ', '-')})."


SHARED = "Options of several commands"
SETTING = ": a setting"
"""How the line of an option ends that is a variable of the environment, too, and has its sentence there."""


def leaves(parser: argparse.ArgumentParser, summary: str = "") -> Iterator[tuple[argparse.ArgumentParser, str]]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser, summary
    for action in inner:
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, leaf in action.choices.items():
            if name in helps:  # an alias is not: its command stands there under its own name
                yield from leaves(leaf, helps[name])


def option(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    takes = "" if action.nargs == 0 or not action.option_strings else f" {value(action)}"
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    shown = f"{names}{takes}".replace("|", "` or `")  # some Markdown parsers end a cell at a bar in code
    meaning = cell(parser._get_formatter()._expand_help(action)) if action.help else ""
    variable = f"HOLDFAST_{action.dest.upper()}"
    known = importlib.import_module("holdfast.smp_daemon.shared.settings").VARIABLES
    if parser.prog == "holdfast smp start" and variable in known:
        return f"* `{shown}`{SETTING}"
    return f"* `{shown}`: {meaning}" if meaning else f"* `{shown}`"


def value(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return f"{{{','.join(map(str, action.choices))}}}"
    return str(action.metavar or action.dest.upper())


# ---------------------------------------------------------------------- variables


def environment() -> Iterator[str]:
    table = importlib.import_module("holdfast.smp_daemon.shared.settings").TABLE
    yield "# Environment variables"
    for section in dict.fromkeys(setting.where for setting in table):
        yield f"## {section.title}"
        yield section.text
        if section.title == "Internal":
            yield ", ".join(f"`{each.variable}`" for each in table if each.where is section) + "."
            continue
        yield "\n".join(
            f"* `{each.variable}`{f' (default {shown(each)})' if shown(each) else ''}: {each.meaning}{more(each)}"
            for each in table
            if each.where is section
        )


def shown(setting: Any) -> str:
    default = setting.shown or setting.default
    return f"`{default}`" if default and " " not in default else default


def more(setting: Any) -> str:
    return f" [More]({setting.page})." if setting.page else ""


if __name__ == "__main__":
    main()
