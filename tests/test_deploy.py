"""What is in deploy/ for supervisors: it parses, it uses options that exist, and its numbers fit each other."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import make_parser
from holdfast.smp_daemon.ops.metrics import COUNTERS, GAUGES
from holdfast.smp_daemon.shared.budget import parse_size
from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/**/*.service"))
SCRIPTS = sorted(DEPLOY.glob("slurm/*.sh"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
MARGIN_S = 5
KIB = {"Mi": 2**20, "Gi": 2**30}


def test_there_is_something_for_every_supervisor() -> None:
    assert UNITS and SCRIPTS and MANIFESTS, "tests of none of them would pass"


def test_alerts_dashboard_and_docs_name_metrics_that_there_are() -> None:
    there = {*GAUGES, *(f"holdfast_{name}_total" for name in COUNTERS)}
    for path in (DEPLOY / "alerts.yml", DEPLOY / "grafana.json", ROOT / "docs/watching.md"):
        named = set(re.findall(r"\bholdfast_[a-z_]+[a-z]\b", path.read_text()))
        assert named and named <= there, path


def test_every_panel_says_what_it_shows_and_what_is_normal() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    described = {panel["title"]: panel.get("description", "") for panel in panels}
    assert len(described) == len(panels) > 10
    for title, description in described.items():
        assert len(re.findall(r"[.:] [^.]+\.", description)) >= 1, f"{title}: what is shown, and what to make of it"
        assert description.endswith("."), title
    assert len(set(described.values())) == len(panels)


# ---------------------------------------------------------------------- what they run and set


def commands(text: str) -> Iterator[list[str]]:
    """Every ``holdfast smp|drain|gc ...`` in a text, in words, with variables of the shell and of systemd filled in."""
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r'"?\$\{?\w+(:-\w+)?\}?"?', "7", text).replace("%i", "7")
    for found in re.finditer(r"\bholdfast[ ,]+(?:smp|drain|gc|status)\b[^\n;|&`\]'\"]*", text):
        yield shlex.split(found[0].replace(",", " ").split("#")[0])[1:]


@pytest.mark.parametrize("path", [*UNITS, *SCRIPTS, *MANIFESTS, ROOT / "docs" / "running.md"], ids=lambda p: p.name)
def test_every_command_is_one_that_the_parser_takes(path: Path) -> None:
    found = [words for words in commands(path.read_text()) if "..." not in words and "|" not in words]
    assert found or path.name == "trainer.yaml"
    for words in found:
        make_parser().parse_args([word for word in words if not re.fullmatch(r"[A-Z]+", word)] + missing(words))


def missing(words: list[str]) -> list[str]:
    """A node for those that name one in capitals."""
    return ["node7"] if words[0] == "drain" and any(re.fullmatch("[A-Z]+", word) for word in words) else []


def test_every_setting_is_one_that_is_read_somewhere() -> None:
    known = set()
    for room in ("smp_daemon", "snapshot", "holdfast", "ec"):
        for path in (ROOT / room).glob("**/*.py"):
            known |= set(re.findall(r"\bHOLDFAST_\w+", path.read_text()))
    known.add("HOLDFAST_KEEP_S")  # the epilog's own
    for path in (*UNITS, *SCRIPTS, *MANIFESTS):
        used = set(re.findall(r"\bHOLDFAST_\w+", path.read_text()))
        assert used <= known, path


# ---------------------------------------------------------------------- systemd and Slurm


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.parent.name)
def test_units_are_what_systemd_takes(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "holdfast@job.service"
    unit.write_text(path.read_text().replace("User=train", "User=root"))
    scope = ["--user"] if path.parent.name == "user" else []
    done = subprocess.run(
        ["systemd-analyze", *scope, "--man=no", "verify", str(unit)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if str(unit.name) in line or "holdfast" in line]
    if scope and done.returncode and not said:
        pytest.skip(f"there is no user manager here: {done.stderr.strip()[-200:]}")
    assert not said, said


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.parent.name)
def test_units_leave_time_for_the_drain(path: Path) -> None:
    text = path.read_text()
    grace, stop = re.search(r"HOLDFAST_GRACE=(\d+)", text), re.search(r"TimeoutStopSec=(\d+)", text)
    assert grace is not None and stop is not None
    assert int(stop[1]) >= int(grace[1]) + MARGIN_S


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=DEADLINE_S)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True, timeout=60)


# ---------------------------------------------------------------------- Kubernetes


def pods(path: Path) -> Iterator[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(path.read_text()):
        assert document.keys() >= {"apiVersion", "kind", "metadata", "spec"}
        template = document["spec"].get("template")
        if template is not None:
            assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        yield template["spec"] if template else document["spec"]


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def settings(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container.get("env", [])}


def size_of(quantity: str) -> int:
    return int(quantity[:-2]) * KIB[quantity[-2:]]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_run_without_privileges_and_within_limits(path: Path) -> None:
    for pod in pods(path):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for name, container in containers(pod).items():
            own = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert own["allowPrivilegeEscalation"] is False
            assert own.get("runAsNonRoot") is True or name == "directory"
            assert container["resources"]["limits"]["memory"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            if "HOLDFAST_ARENA" in settings(container):
                where = Path(settings(container)["HOLDFAST_ARENA"])
                mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
                assert any(mount == where or mount in where.parents for mount in mounts)


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_an_smps_pod_has_time_to_drain_and_memory_for_its_budget(name: str) -> None:
    (pod,) = pods(DEPLOY / "kubernetes" / name)
    smp = containers(pod)["smp"]
    said = settings(smp)
    assert pod["terminationGracePeriodSeconds"] >= int(said["HOLDFAST_GRACE"]) + MARGIN_S
    budget = parse_size(said["HOLDFAST_MEMORY"])
    assert size_of(smp["resources"]["limits"]["memory"]) >= budget + 2**30
    for volume in pod["volumes"]:
        if "emptyDir" in volume:
            assert volume["emptyDir"]["medium"] == "Memory"
            assert size_of(volume["emptyDir"]["sizeLimit"]) > budget


def test_trainers_meet_the_daemonsets_smp() -> None:
    ((smp_pod,), (trainer_pod,)) = (pods(DEPLOY / "kubernetes" / name) for name in ("daemonset.yaml", "trainer.yaml"))
    smp, trainer = containers(smp_pod)["smp"], containers(trainer_pod)["trainer"]
    for name in ("HOLDFAST_JOB", "HOLDFAST_ARENA"):
        assert settings(smp)[name] == settings(trainer)[name]
    assert smp["securityContext"]["runAsUser"] == trainer["securityContext"]["runAsUser"]
    assert smp["volumeMounts"] == trainer["volumeMounts"]
    assert smp_pod["volumes"] == trainer_pod["volumes"]
