"""What README and docs promise, and which tests prove it.

A test says so itself: ``@pytest.mark.proves("a-name")``. `docs/generate.py` makes docs/proof.md of this, and
``python -m tools.proof`` runs those tests.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARK = "proves"
SLOW = ("pytest.mark.slow", "SLOW")


class Promise(NamedTuple):
    """`text` stands in `page` word for word."""

    page: str
    text: str


class Proof(NamedTuple):
    """A test: its file, from the root on, and its name; `slow`: run by `make slow` and `make proof`."""

    file: str
    test: str
    slow: bool


PROMISES = {
    "any-instruction": Promise(
        "README.md", "its state is restored bit for bit if all trainers die at any instruction and at most m nodes"
    ),
    "trainers-die": Promise("README.md", "| trainers or launchers die | restored from their own node's memory |"),
    "an-smp-dies": Promise(
        "README.md", "| a snapshot process dies | its successor takes over its memory; training continues |"
    ),
    "nodes-are-lost": Promise("README.md", "| m nodes of a group are lost | rebuilt from the others |"),
    "too-many-are-lost": Promise("README.md", "| more than m are lost | `Unrecoverable`, never a wrong state;"),
    "storage": Promise("README.md", "or the newest snapshot on [storage](docs/persist.md), if enabled |"),
    "bits-flip": Promise("README.md", "| bits flip | found by digests, repaired from parity |"),
    "a-node-must-go": Promise("README.md", "| a node must go | `holdfast drain` moves its data away first |"),
    "no-disk": Promise("README.md", "by default after every step, and no disk is involved."),
    "mid-epoch": Promise("README.md", "resumes in the middle of the epoch"),
    "plain-loader": Promise("README.md", "`loader` is a plain `DataLoader`, shuffled or not."),
    "one-name": Promise("README.md", "from holdfast import InMemorySnapshot"),
    "demo": Promise("README.md", "trains a Megatron GPT, kills a trainer and a whole node, compares to the last bit"),
    "megatron-lm": Promise(
        "README.md",
        "| [Megatron-LM](docs/megatron-lm.md) | `python -m holdfast.megatron_lm pretrain_gpt.py`, unedited |",
    ),
    "frameworks": Promise("README.md", "| PyTorch, DDP, [FSDP2](docs/fsdp2.md) | `InMemorySnapshot(model, optim)` |"),
    "lightning": Promise("README.md", "| [Lightning](docs/lightning.md) | a callback |"),
    "hugging-face": Promise(
        "README.md",
        "[Hugging Face Trainer](docs/hugging-face.md), [accelerate](docs/accelerate.md) | `protect(trainer)`,",
    ),
    "deepspeed": Promise("README.md", "| [DeepSpeed](docs/deepspeed.md) | a checkpoint engine, any ZeRO stage |"),
    "torchft": Promise("README.md", "| [torchft](docs/torchft.md) | a checkpoint transport |"),
    "dcp": Promise("README.md", "| [DCP](docs/dcp.md) | a storage writer and reader |"),
    "ray": Promise("README.md", "| [Ray](docs/ray.md) | actors, and Ray Train |"),
    "sealed-only": Promise("docs/guarantee.md", "A snapshot that was not sealed is never restored."),
    "sealed-comes-back": Promise(
        "docs/guarantee.md", "it or a younger one comes back bit for bit if only processes die"
    ),
    "sent-to-nobody": Promise("docs/protection.md", "a snapshot that is not to be protected is sent to nobody"),
    "every-failpoint": Promise("docs/guarantee.md", "This is tested at every failpoint of the protocol."),
    "renumbered": Promise("docs/guarantee.md", "shards are found by their coordinate and fetched"),
    "regroup": Promise("docs/guarantee.md", "the survivors regroup and protect each other again"),
    "never-older": Promise("docs/guarantee.md", "nor one older than the remaining nodes know to be protected"),
    "repaired-parity": Promise("docs/guarantee.md", "so is their parity, so that the group tolerates the next losses"),
    "scrub": Promise("docs/guarantee.md", "found by their digests, also by a slow scrub"),
    "fenced": Promise("docs/guarantee.md", "it can write nothing: epochs fence it"),
    "exact-or-given-up": Promise(
        "docs/loops.md", "Every snapshot is exactly that state, or it is given up, and the log names what changed."
    ),
    "all-or-refused": Promise(
        "docs/loops.md", "A restore puts all of it back, or is refused with an error that names what differs."
    ),
    "start-up-may-draw": Promise("docs/loops.md", "no matter what start-up has drawn from them"),
    "cut-and-back": Promise(
        "docs/elastic.md",
        "and back to four, without a step in between, every rank has the very bytes that it had.",
    ),
    "streams": Promise("docs/elastic.md", "A rank that stays keeps its streams."),
    "crash-loops": Promise("docs/restarts.md", "the next one is refused on every rank, before anything is restored"),
    "budget": Promise("docs/interval.md", "Where they would take more, the ranks lengthen the interval together"),
    "never-waits": Promise("docs/interval.md", "the step is skipped; training never waits for one."),
    "checked-on-arrival": Promise("docs/loading.md", "Every unit is checked against its digest when it arrives."),
    "stragglers": Promise(
        "docs/loading.md", "the late unit is requested from others, and the first whole answer is used."
    ),
    "survivors": Promise(
        "docs/in-process.md", "Instead the survivors can leave, join a new process group and enter again"
    ),
    "forgotten": Promise("docs/audit.md", "and names what was forgotten"),
    "memory-before-storage": Promise(
        "docs/persist.md", "a job that has lost more memory than parity makes up for resumes"
    ),
    "other-users": Promise("SECURITY.md", "reads and writes nothing of a job"),
    "other-hosts": Promise("SECURITY.md", "is told nothing and changes nothing, whatever it sends"),
    "older-epochs": Promise("SECURITY.md", "writes nothing, on any path"),
    "spoilt-files": Promise("SECURITY.md", "are not believed; the rest of the group gives the bytes back"),
    "no-code": Promise("SECURITY.md", "**Nothing becomes code.**"),
}
"""By the names that tests give them."""


def proofs() -> dict[str, list[Proof]]:
    """The tests that prove each promise, as their files say; nothing is imported.

    Raises:
        KeyError: a test proves a promise that there is not.
    """
    found: dict[str, list[Proof]] = {name: [] for name in PROMISES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                slow = any(ast.unparse(each) in SLOW for each in node.decorator_list)
                proof = Proof(str(path.relative_to(ROOT)), node.name, slow)
                for name in _named(node):
                    found[name].append(proof)
    return found


def _named(test: ast.FunctionDef) -> list[str]:
    return [
        str(argument.value)
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(f"mark.{MARK}")
        for argument in mark.args
        if isinstance(argument, ast.Constant)
    ]
