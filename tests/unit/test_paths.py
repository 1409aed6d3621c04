"""Where arenas are, and who owns them."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.smp_daemon.service import bind_unix
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.limits import is_identifier
from holdfast.smp_daemon.shared.paths import Owner, arena_path, checked, find_owners, read_owner, socket_path
from holdfast.smp_daemon.shared.records import write_json
from holdfast.snapshot.connect import node_from_environment

OWNER = Owner(pid=7, start_ticks=15, job="run", node="a", host="h", control_port=1, bulk_port=2)


def test_an_arena_lies_in_shared_memory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_ARENA", raising=False)
    assert arena_path("run") == Path(f"/dev/shm/holdfast-{os.getuid()}/run")


def test_the_environment_moves_all_arenas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA", str(tmp_path))
    assert arena_path("run") == tmp_path / "run"
    assert arena_path("run", Path("/elsewhere")) == Path("/elsewhere/run")
    assert socket_path(arena_path("run")) == tmp_path / "run" / "smp.sock"


@pytest.mark.parametrize("job", ["", "..", "../other", "a/b", "a b", "x" * 65])
def test_a_job_id_never_leads_out_of_the_base(job: str) -> None:
    with pytest.raises(ConfigError, match="job id"):
        arena_path(job)


@pytest.mark.parametrize("host", ["vm", "_Rechner-ä.example", "x" * 80, "...", ""])
def test_whatever_a_host_is_called_its_node_has_a_name(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_NODE", raising=False)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=host))
    assert is_identifier(checked(node_from_environment(), "the name of a node"))


def test_a_socket_may_lie_under_a_name_that_is_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    bind_unix(folder / "smp.sock").close()
    with pytest.raises(ConfigError, match="longer than"):
        bind_unix(folder / ("x" * 100) / "smp.sock")


def test_an_arena_that_is_removed_during_the_search_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "gone", "z"):
        (tmp_path / name).mkdir()
    for name in ("a", "z"):
        write_json(tmp_path / name / "smp.json", asdict(replace(OWNER, node=name)))
    scan = os.scandir

    def scan_late(path: Any) -> Any:
        if Path(path).name == "gone" and Path(path).exists():
            Path(path).rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert [owner.node for owner in find_owners(tmp_path)] == ["a", "z"]
    assert not (tmp_path / "gone").exists()


def test_the_owner_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_owner(tmp_path) is None
    write_json(tmp_path / "smp.json", asdict(OWNER))
    assert read_owner(tmp_path) == OWNER


@pytest.mark.parametrize("data", [5, "owner", [1, 2], {"pid": 7}])
def test_a_malformed_owner_is_refused(data: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "smp.json", data)
    with pytest.raises(ProtocolError):
        read_owner(tmp_path)
