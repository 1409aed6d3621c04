"""The rooms: what may import what, what starts quickly, and what must not appear anywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ["ec", "smp_daemon", "snapshot", "integrations", "chaos", "holdfast", "examples"]
"""Lowest first: a room imports itself and those before it."""
GENERATED = ("peer_pb2.py", "peer_pb2_grpc.py")


def modules(*rooms: str) -> Iterator[Path]:
    for room in rooms:
        yield from (path for path in sorted((ROOT / room).glob("**/*.py")) if path.name not in GENERATED)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def part_of(name: str) -> str:
    """The room of a module: ``snapshot`` of ``holdfast.snapshot.hook``, ``holdfast`` of ``holdfast.cli``."""
    first, *rest = name.split(".")
    return rest[0] if first == "holdfast" and rest and rest[0] in ROOMS else first


def test_everything_is_imported_by_one_name() -> None:
    for path in modules(*ROOMS, "tests", "benchmarks"):
        taken = {name.split(".")[0] for name in imports(path)} & set(ROOMS) - {"holdfast", "examples"}
        assert not taken, f"{path} imports {sorted(taken)}, which may be anybody's: import them from holdfast"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_itself_and_rooms_below(room: str) -> None:
    above = ROOMS[ROOMS.index(room) + 1 :]
    for path in modules(room):
        for name in imports(path):
            assert part_of(name) not in above, f"{path} imports {name}"


def test_the_trainer_side_reaches_the_smp_only_through_its_client_and_the_shared_formats() -> None:
    formats = {"errors", "layout", "limits", "slotfile", "inventory", "sources", "starts", "board", "points", "logs"}
    shared = {"client", "spawn", "paths", "plan", *formats}
    for path in modules("snapshot"):
        for name in imports(path):
            if name.startswith("holdfast.smp_daemon."):
                assert name.split(".")[2] in shared, f"{path} imports {name}"


@pytest.mark.parametrize("room", ["ec", "smp_daemon"])
def test_below_the_trainer_nothing_imports_torch(room: str) -> None:
    for path in modules(room):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, path


def test_nothing_unpickles_or_evaluates() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    for path in modules(*ROOMS):
        tree = ast.parse(path.read_text())
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not forbidden & {name.split(".")[0] for name in imports(path)}, path
        assert not {"eval", "exec", "torch.load"} & calls, path


def test_the_front_door_opens_quickly_and_without_frameworks() -> None:
    code = "import sys, holdfast; print([m for m in ('torch', 'ray', 'megatron', 'grpc', 'numpy') if m in sys.modules])"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - began < 10


def test_the_version_is_printed_without_frameworks() -> None:
    code = (
        "import sys, holdfast.cli.main as cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'ray', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split("\n")[1] == "0 []"


def test_the_generated_stubs_are_those_of_the_proto_file(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"),
            str(ROOT / "holdfast/smp_daemon/net/peer.proto"),
        ],
        check=True,
        timeout=60,
    )
    for name in (*GENERATED, "peer_pb2.pyi"):
        made, kept = tmp_path / "holdfast/smp_daemon" / name, ROOT / "smp_daemon" / name
        assert made.read_text() == kept.read_text(), f"{name}: run `make proto`"
