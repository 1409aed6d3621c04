"""``holdfast plan``: parameters and bytes against published figures, and impossible jobs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import ConfigError
from holdfast.cli.main import main
from holdfast.planner.sizing import PRESETS, Machine, ModelJob, activation_bytes, device_bytes, parse_shape, size
from holdfast.snapshot.resume.arrange import parse_protect

SEVEN = ModelJob(PRESETS["7b"], nodes=8)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("70b", 68_976_648_192),
        ("405b", 405_853_388_800),
        ("moe-8x7b", 46_702_792_704),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert PRESETS[name].parameters == parameters


def test_a_mixture_of_ones_own_is_read() -> None:
    text = "layers=32,hidden=4096,inner=14336,heads=32,kv_heads=8,vocab=32000,experts=2/8"
    assert replace(parse_shape(text), name="moe-8x7b") == PRESETS["moe-8x7b"]


@pytest.mark.parametrize(
    "text",
    [
        "8b",
        "layers=2",
        "layers=1,hidden=10,inner=4,heads=3,kv_heads=1,vocab=9",
        "layers=1,hidden=8,inner=4,heads=2,kv_heads=1,vocab=9,experts=3/2",
    ],
)
def test_a_shape_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--model"):
        parse_shape(text)


def test_zero_shares_out_what_its_stage_says() -> None:
    """ZeRO's own figures: 7.5 billion parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB (figure 1 of the paper)."""
    shape = replace(PRESETS["7b"], layers=1, hidden=1, inner=0, heads=1, kv_heads=1, vocab=7_500_000_000 - 7, tied=True)
    assert shape.parameters == pytest.approx(7.5e9)
    found = [device_bytes(replace(SEVEN, shape=shape, zero=zero, sequence=1)) / 1e9 for zero in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


def test_activations_are_those_of_the_paper() -> None:
    """Korthikanti et al., table 2: 34 + 5 a s / h of s b h bytes a layer; 80 for GPT-3's attention (page 6)."""
    shape = replace(PRESETS["7b"], layers=1, hidden=12288, heads=96, kv_heads=96)
    job = ModelJob(shape, 1, tensor=1, sequence=2048, recompute="none", flash=False)
    assert activation_bytes(job) == 2048 * 12288 * (34 + 80)
    assert activation_bytes(replace(job, recompute="selective")) == 2048 * 12288 * 34
    assert activation_bytes(replace(job, recompute="full")) == 2048 * 12288 * 2


def test_every_byte_is_captured_once_however_it_is_sharded() -> None:
    machine, protect = Machine(), parse_protect("auto")
    shares = {size(replace(SEVEN, zero=z, tensor=t), machine, protect).node_bytes for z in range(4) for t in (1, 8)}
    assert shares == {6_738_415_616 * 12 / 8}


def test_times_and_memory_follow_from_rates() -> None:
    machine = Machine(25e9, 10e9, 10e9, digest_rate=20e9)
    found = size(SEVEN, machine, parse_protect("4+2"), slots=3)
    stored = size(SEVEN, machine, parse_protect("4+2"), slots=3, persists=True)
    assert stored.arena_bytes - found.arena_bytes == pytest.approx(found.node_bytes)
    node = 6_738_415_616 * 12 / 8
    assert (found.data, found.parity) == (4, 2)
    assert found.arena_bytes == pytest.approx(3 * node * 1.5)
    assert found.copy_s == pytest.approx(node / 200e9)
    assert found.seal_s == pytest.approx(node / 20e9)
    assert found.encode_s == pytest.approx(2 * node / 10e9)
    assert found.protected_s == pytest.approx(found.copy_s + found.seal_s + found.encode_s)
    assert found.interval_s == pytest.approx(found.encode_s)
    assert size(SEVEN, replace(machine, digest_rate=1e9), parse_protect("4+2")).interval_s == pytest.approx(
        node / 200e9 + node / 1e9
    )
    assert size(replace(SEVEN, step_s=0.9), machine, parse_protect("4+2")).interval_steps == 3
    assert size(replace(SEVEN, offload=True), machine, parse_protect("none")).copy_s == pytest.approx(node / 10e9)


def test_a_frozen_base_is_captured_once_and_kept() -> None:
    found = size(replace(SEVEN, base="4bit"), Machine(), parse_protect("none"))
    assert found.static_bytes == 6_738_415_616 / 2
    assert found.state_bytes == pytest.approx(12 * 39_976_960)  # LoRA of rank 16 on all linear parts of Llama 2 7B
    assert found.node_bytes == (found.state_bytes + found.static_bytes) / 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "0 nodes of 8 GPUs"),
        (["--tensor", "3"], "tensor 3 x pipeline 1 does not divide 64 GPUs"),
        (["--protect", "8+2"], r"8\+2 needs 10 nodes, and there are 8"),
        (["--slots", "1"], "1 slots: a shard has 2 to 16 slots"),
        (["--zero", "4"], "ZeRO stages are 0 to 3"),
        (["--optimizer", "lion"], "'lion'.* is not known"),
        (["--step", "12"], "--step: '12' has no unit"),
        (["--device-rate", "0"], "rates must be more than 0"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "7b", *options]) == 2

    assert re.search(message, capsys.readouterr().err)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", "--nodes", "16", "--host-memory", "200GB", "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    assert len(rows) == 6 + 3 * 6
    assert {row["job"]["nodes"] for row in rows} == {16}
    output = capsys.readouterr().out
    assert "70b adapters on 4 bits" in output
    assert re.search(
        "arenas of more than half of a node's 200 GB .*405b ZeRO-3 1.04 TB.*: use more nodes", " ".join(output.split())
    )
    lines = output.splitlines()
    table = lines[: lines.index("")]
    assert len(table) == len(rows) + 1 and max(map(len, table)) <= 80
    assert "…" not in output and not [line for line in lines if line != line.rstrip()]
    assert main(["plan", "--model", "70b", "--step", "10s", "--smp-cores", "64"]) == 0
    assert "1 steps" in capsys.readouterr().out


def test_a_gpu_that_cannot_hold_what_it_is_told_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    report = "-"
    assert main(["plan", "--model", "70b", "--json", report]) == 0
    told = capsys.readouterr()
    assert [row["fits_gpu"] for row in json.loads(told.out)] == [False]
    assert "WARNING: more than the 80 GB of a GPU (--gpu-memory): 70b" in " ".join(told.err.split())
    assert main(["plan", "--model", "70b", "--tensor", "8", "--zero", "3", "--gpu-memory", "141GB"]) == 0
    assert "WARNING" not in capsys.readouterr().out
