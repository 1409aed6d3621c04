"""Nothing that came over a socket or is in shared memory becomes code: nothing is unpickled or evaluated.

Two checks. By syntax: no module of the SMP or of a trainer's snapshot code names such a function. By import: none of
our own modules that an SMP's process has loaded holds such a module under any name. The checks cannot see names that
are put together at run time, C extensions (protobuf's and gRPC's parsers are C++, torch is not reached from here), and
what a user's own ``state_dict`` does with its input.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from tests.scripts import python
from tests.system.test_architecture import MODULES as PRODUCT
from tests.system.test_architecture import ROOT, imports, parsed

MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "dbm", "code", "codeop"),
    *("imp", "xmlrpc", "multiprocessing.connection", "multiprocessing.managers", "yaml", "jsonpickle"),
}
"""Modules that must not be imported."""

CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
"""Builtins that must not be called."""

METHODS = {
    *("torch.load", "torch.save", "torch.jit.load", "numpy.load", "np.load", "np.save", "np.fromfile", "yaml.load"),
    *("np.lib.format.read_array", "os.system", "os.popen", "importlib.import_module", "importlib.reload"),
    *("builtins.eval", "builtins.exec", "types.CodeType", "ctypes.pythonapi", "logging.config.listen"),
}

ROOMS = ("ec", "smp_daemon", "snapshot")

ALLOWED = {
    # Called with constants, or names that this process chose; nothing comes from outside.
    ("snapshot/state/reach.py", "importlib.import_module"),
    ("snapshot/state/walk.py", "types.CodeType"),  # inspected, never created
}


def found(path: Path) -> set[str]:
    """The forbidden names that a module uses."""
    names = {name for name in imports(path) if name in MODULES or name.split(".")[0] in MODULES}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg for keyword in node.keywords}
            is_builtin = isinstance(node.func, ast.Name) and called in CALLS
            names |= {called} if is_builtin or called in METHODS or "allow_pickle" in keywords else set()
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in METHODS:
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            names.add(node.id)
    return names


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.proves("no-code")
def test_nothing_is_named_that_makes_code_of_data(room: str) -> None:
    for path in (path for name, path in PRODUCT.items() if name.partition(".")[0] == room):
        relative = str(path.relative_to(ROOT))
        assert {name for name in found(path) if (relative, name) not in ALLOWED} == set(), relative


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from pickle import loads", "import marshal as m", "from multiprocessing import connection"),
        *("eval(text)", "exec(text)", "f = eval", "torch.load(file)", "np.load(file, allow_pickle=True)"),
        *("load(file, allow_pickle=True)", "yaml.load(text)", "compile(text, '', 'exec')", "reader = torch.load"),
    ],
)
def test_the_check_sees_what_it_is_for(tmp_path: Path, line: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    if line == "from multiprocessing import connection":
        path.write_text("import multiprocessing.connection")
    assert found(path)


@pytest.mark.proves("no-code")
def test_an_smp_imports_no_module_that_unpickles_for_it() -> None:
    """By import: none of our own modules that a serving SMP's process has loaded has `pickle` in it."""
    code = (
        "import json, sys\n"
        "from holdfast.smp_daemon import __main__, service\n"
        "from holdfast.smp_daemon.ops import web\n"
        "ours = ('holdfast.ec.', 'holdfast.smp_daemon.')\n"
        "mine = [m for n, m in sys.modules.items() if f'{n}.'.startswith(ours)]\n"
        "bad = ('pickle', '_pickle', 'marshal', 'shelve', 'code')\n"
        "held = {m.__name__: [k for k, v in vars(m).items() if getattr(v, '__name__', '') in bad] for m in mine}\n"
        "print(json.dumps({'modules': len(mine), 'bad': {k: v for k, v in held.items() if v},\n"
        "    'torch': 'torch' in sys.modules, 'yaml': 'yaml' in sys.modules}))\n"
    )
    done = python(code, env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = json.loads(done.stdout)
    assert said["modules"] > 40
    assert said["bad"] == {}
    assert not said["torch"] and not said["yaml"]
