"""Paths in place of names: of jobs, nodes, shards, groups and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.messages import SlotFile
from holdfast.smp_daemon.shared.paths import arena_path
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.spawn import smp_command
from tests.smp_kit import JOB, refusal
from tests.system.attacks.victim import Victim, ask, ask_control

TRICKS = (
    *(
        "../escape",
        "../../../../tmp/escape",
        "/tmp/escape",
        "a/../../b",
        "..",
        ".",
        "",
        ".hidden",
        "-rf",
        "a/b",
        "a\\b",
    ),
    *("a\0b", "a\nb", "x" * 65, "x" * 4096, "éclair", "a b", "~", "$HOME", "%2e%2e%2f", "nul\u2044l"),
)


@pytest.fixture
def nothing_new(victim: Victim) -> Iterator[None]:
    """No file may appear, in the arena or around it."""

    def files() -> set[Path]:
        return {path for path in victim.ground.base.rglob("*") if not path.name.startswith("smp.log")}

    before = files()
    yield
    assert files() == before
    assert not Path("/tmp/escape").exists()


@pytest.mark.parametrize("job", TRICKS)
def test_as_job_ids(job: str) -> None:
    with pytest.raises(ConfigError, match="job id"):
        arena_path(job, Path("/dev/shm"))


def test_as_a_job_id_of_an_smp_that_is_started(victim: Victim, nothing_new: None) -> None:
    """The arena has its own option. The job id that an SMP reports to others must not become a path anywhere."""
    with pytest.raises(ConfigError):
        refused = refusal(smp_command("../escape", "node0", victim.smp.arena, victim.smp.host))
        raise refused


@pytest.mark.parametrize("name", TRICKS)
@pytest.mark.usefixtures("nothing_new")
def test_as_names_in_messages(victim: Victim, name: str) -> None:
    run = victim.run
    layout = to_plain(run.layout)
    in_layout: list[Any] = [
        {**layout, "job": name},
        {**layout, "epoch": 1, "nodes": [{**layout["nodes"][0], "name": name}, layout["nodes"][1]]},
        {**layout, "nodes": [{**layout["nodes"][0], "shards": [{"coord": name, "bytes": 9}]}, layout["nodes"][1]]},
    ]
    told = [ask(victim.local, {"op": "configure", "layout": each}) for each in in_layout]
    seal = {"op": "seal", "snapshot": [1, 8], "coord": "dp0", "slot": "dp0.0.safetensors", "taken": 1, "keep": []}
    told += [ask(victim.local, {**seal, "coord": name})]
    assert ask(victim.local, {**seal, "snapshot": [run.epoch, 8], "slot": name}).get("error") == "StaleEpoch"
    told += [ask_control(victim.control, {"op": "inventory", "job": name})]
    parity = {"op": "parity_unit", "tag": name, "position": 0, "unit": 0}
    for what in ({"op": "shard_unit", "coord": name, "unit": 0}, parity):
        told += [ask(victim.smp.bulk, {"op": "fetch", "job": JOB, "snapshot": [1, 1], "what": what})]
    assert {reply.get("error") for reply in told} == {"ProtocolError"}


@pytest.mark.parametrize("file", ["../node1/testrun/board", "/etc/passwd", "..", "a/b"])
def test_as_files_that_an_smp_names_to_a_trainer(victim: Victim, file: str) -> None:
    client = victim.run["dp0"].client
    with pytest.raises(ProtocolError, match="of the arena"):
        client._slots.map(SlotFile(file=file, inode=1, bytes=10))


def test_a_slot_of_another_length_is_not_mapped(victim: Victim) -> None:
    """Reading past the end of a mapped file kills the process."""
    client = victim.run["dp0"].client
    path = next(victim.smp.arena.glob("dp0.*.safetensors"))
    status = path.stat()
    for length in (status.st_size + 1, status.st_size - 1, 0, -1, 1 << 62):
        client._slots._maps.clear()
        with pytest.raises(HoldfastError, match="bytes, not"):
            client._slots.map(SlotFile(file=path.name, inode=status.st_ino, bytes=length))
