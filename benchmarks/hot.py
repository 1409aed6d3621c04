"""Whether the published figures are of today's code: a digest of what runs in every snapshot, kept in each result.

Comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

HOT = (
    "snapshot/stream.c",
    "snapshot/loop.py",
    "snapshot/protecting.py",
    "snapshot/copy/engines.py",
    "snapshot/copy/pace.py",
    "snapshot/copy/runs.py",
    "snapshot/copy/unit_digests.py",
    "snapshot/copy/witness.py",
    "snapshot/state/manifest.py",
    "snapshot/step/boundary.py",
    "snapshot/step/capture.py",
    "snapshot/step/copier.py",
    "snapshot/step/orders.py",
    "smp_daemon/coding/protect.py",
    "smp_daemon/coding/sending.py",
    "smp_daemon/shared/receive.c",
    "smp_daemon/storage/parity.py",
)
"""What the training thread, the copy thread and the SMP run for each snapshot."""


def digest(root: Path = ROOT) -> str:
    """The digest of the hot files below `root`."""
    total = hashlib.sha256()
    for name in HOT:
        text = (root / name).read_text()
        total.update(f"{name}\n{_python(text) if name.endswith('.py') else _c(text)}\n".encode())
    return total.hexdigest()[:16]


def check(root: Path = ROOT, results: Path = RESULTS) -> None:
    """Raises `ConfigError` if a hot file has changed since the newest result that has a digest of them."""
    kept = [found for path in results.glob("stall-*.json") if (found := json.loads(path.read_text())).get("hot")]
    newest = max(kept, key=lambda found: str(found["date"]), default=None)
    if newest is not None and newest["hot"] != digest(root):
        raise ConfigError(
            f"the figures of {newest['date'][:10]} are not of today's code, as a file of `benchmarks.hot.HOT` has "
            "changed: repeat them with `make stall`, on an idle machine, and then `make docs`"
        )


def _python(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _c(text: str) -> str:
    return " ".join(re.sub(r"/\*.*?\*/", " ", text, flags=re.S).split())
